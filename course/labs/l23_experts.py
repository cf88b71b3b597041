"""Lesson 23: published mixtures of experts, small GPTs that train, and finished exercises.

Held by: tests/unit/test_l23_labs.py
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course.labs import l18_gpt
from labcode.config import GPTConfig
from labcode.models import gpt, layers, moe

EXPERTS = 8
TOP_K = 2
STEPS = 200
WARMUP_STEPS = 20
LR = 3e-3


# ---- published models


class Mixture(NamedTuple):
    """The sizes of a published model that decide how many parameters it has.

    Args:
        moe_layers: Layers with experts.
        hidden_size: Features of a token.
        expert_ffn: Features inside one expert, which has three matrices.
        experts: Number of experts of each of these layers; a token uses some of them.
        top_k: How many.
        shared: Further experts of each layer, through which every token goes.
        others: All other parameters: attention, embeddings, layers without experts.
    """

    moe_layers: int
    hidden_size: int
    expert_ffn: int
    experts: int
    top_k: int
    shared: int
    others: int


# `others` is computed from the same files: attention with the matrices of its kind, embedding and
# head, and for DeepSeek-V3 the MLPs of its three first layers.
MIXTURES = {
    "Mixtral 8x7B": Mixture(32, 4096, 14336, 8, 2, 0, 1_604_587_520),
    "gpt-oss-120b": Mixture(36, 2880, 2880, 128, 4, 0, 2_113_992_000),
    "Qwen3-235B-A22B": Mixture(94, 4096, 1536, 128, 8, 0, 7_947_931_648),
    "DeepSeek-V3": Mixture(58, 7168, 2048, 256, 8, 1, 14_456_747_008),
}
# (all, active), billions of parameters, as their makers say
PUBLISHED = {
    "Mixtral 8x7B": (47, 13),
    "gpt-oss-120b": (116.8, 5.1),
    "Qwen3-235B-A22B": (235, 22),
    "DeepSeek-V3": (671, 37),
}


def total_and_active(model: Mixture) -> tuple[int, int]:
    """Exercise 23.1, finished: (all parameters, those that one token uses)."""
    one = model.moe_layers * 3 * model.hidden_size * model.expert_ffn  # an expert in each layer
    always = model.others + model.shared * one
    return always + model.experts * one, always + model.top_k * one


# ---- the router


def route(x: Tensor, weight: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Exercise 23.2, finished: (weights [T, k], experts [T, k], balance loss).

    Args:
        x: [T, H]
        weight: [E, H]
        top_k: k
    """
    scores = (x @ weight.T).softmax(-1)  # [T, E]
    largest, experts = scores.topk(top_k, -1)
    weights = largest / largest.sum(-1, keepdim=True)
    rows = torch.bincount(experts.flatten(), minlength=len(weight))
    loss = len(weight) * (rows / rows.sum() * scores.mean(0)).sum()
    return weights, experts, loss


def choose_with_bias(
    scores: Tensor, bias: Tensor, top_k: int, rate: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Exercise 23.3, finished: (weights [T, k], experts [T, k], the bias of the next step [E]).

    Args:
        scores: [T, E], each from 0 to 1.
        bias: [E]
        top_k: k
        rate: Amount by which a bias moves.
    """
    experts = (scores + bias).topk(top_k, -1).indices
    weights = scores.gather(-1, experts)
    weights = weights / weights.sum(-1, keepdim=True)
    rows = torch.bincount(experts.flatten(), minlength=len(bias)).to(bias.dtype)
    return weights, experts, bias + rate * (rows.mean() - rows).sign()


# ---- dispatch

Compute = Callable[[Tensor, Tensor], Tensor]


def through_experts(
    x: Tensor, weights: Tensor, experts: Tensor, mlps: Compute, num_experts: int
) -> Any:
    """Exercise 23.4, finished: each token's weighted sum of what its experts make of it, [T, H].

    Args:
        x: [T, H]
        weights: [T, k]
        experts: [T, k] int64.
        mlps: `mlps(rows, counts)`, of rows that are sorted by expert.
        num_experts: E, how many experts there are.
    """
    order, counts = moe.dispatch(experts[None], num_experts)
    done = mlps(x[order // experts.shape[1]], counts)
    return moe.combine(done, order, weights[None])[0]


def in_a_loop(
    x: Tensor, weights: Tensor, experts: Tensor, expert_mlps: Sequence[Callable[[Tensor], Tensor]]
) -> Tensor:
    """The definition: every expert computes all tokens, and most of it is multiplied by zero."""
    out = torch.zeros_like(x)
    for number, expert_mlp in enumerate(expert_mlps):
        weight = (weights * (experts == number)).sum(-1, keepdim=True)  # 0 for most tokens
        out = out + weight * expert_mlp(x)
    return out


def with_loads(loads: Sequence[int]) -> Tensor:
    """A choice of experts, [1, S, 1], in which each expert gets so many rows, in mixed order."""
    numbers = torch.arange(len(loads)).repeat_interleave(torch.tensor(loads))
    order = torch.randperm(len(numbers), generator=torch.Generator().manual_seed(4))
    return numbers[order].view(1, -1, 1)


# ---- small GPTs


def mixture(**changes: Any) -> GPTConfig:
    """A GPT of two layers with 8 experts of 96 features each, of which a token uses 2."""
    sizes: dict[str, Any] = {
        "vocab_size": l18_gpt.CHARACTERS,
        "context_length": l18_gpt.CONFIG.context_length,
        "num_layers": 2,
        "num_heads": 4,
        "hidden_size": 64,
        "positions": "rotary",
        "norm": "rms",
        "mlp": "swiglu",
        "bias": False,
        "num_experts": EXPERTS,
        "experts_per_token": TOP_K,
        "expert_ffn_size": 96,
    }
    return GPTConfig(**(sizes | changes))


RUNS = {
    "no balance": mixture(router_balance=0.0),
    "balance loss": mixture(router_balance=0.01),
    "bias": mixture(router="sigmoid", router_balance=0.0, router_bias_rate=0.01),
}


# Validation losses of `python -m labcode.train gpt_moe_tiny --train.seed SEED`, and of the dense
# models with `--model.num_experts 0 --model.ffn_size 192`, or 768: torch 2.13.0 on two CPU cores,
# 2026-11-29. {model: {seed: nats per character after RECORDED_STEPS}}
RECORDED_STEPS = [300, 600, 900, 1200, 1500]
RECORDED = {
    "mixture": {
        0: [2.0277, 1.8334, 1.7722, 1.6917, 1.6588],
        1: [2.1417, 1.9157, 1.7827, 1.7297, 1.6839],
    },
    "dense, same active": {
        0: [2.0393, 1.8842, 1.8047, 1.7309, 1.6974],
        1: [2.0255, 1.8652, 1.7641, 1.7080, 1.6682],
    },
    "dense, same total": {0: [1.9902, 1.8510, 1.7687, 1.6891, 1.6380]},
}


class Training(NamedTuple):
    """What became of a training.

    Args:
        losses: Losses of each step, nats per character.
        loads: [steps, layers, E], the fraction of the rows that each expert got.
    """

    losses: list[float]
    loads: Tensor


def trained(run: str, seed: int = 0, steps: int = STEPS) -> Training:
    """Train one of RUNS on Shakespeare's characters.

    Args:
        run: A key of RUNS.
        seed: Seed of the weights at the start.
        steps: How many.
    """
    model = layers.initialize(gpt.GPT(RUNS[run]), seed=seed)
    routers = [module for module in model.modules() if isinstance(module, moe.Router)]
    weights = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=LR)
    losses = []
    loads = []
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = LR * min(1, (step + 1) / WARMUP_STEPS)
        tokens, targets = l18_gpt.batch(step)
        loss = gpt.loss(model(tokens), targets)  # the routers' losses hang on their weights
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        losses.append(loss.item())
        loads.append(_finish_step(routers))
    return Training(losses, torch.stack(loads))


@torch.no_grad()
def _finish_step(routers: list[moe.Router]) -> Tensor:
    """Move the biases by the load of a step; returned is that load, [layers, E]."""
    loads = []
    for router in routers:
        assert router.load is not None
        loads.append(router.load / router.load.sum())
        if router.bias is not None:
            router.bias.add_(router.move_of_bias(router.load))
        router.load = None
    return torch.stack(loads)


_done: dict[str, Training] = {}


def my_share(runs: list[str]) -> dict[str, Training]:
    """The trainings that this rank does: every n-th of the runs."""
    torch.set_num_threads(1)
    return {run: trained(run) for run in runs[dist.get_rank() :: dist.get_world_size()]}


def all_trained(ranks: Any) -> dict[str, Training]:
    """{run: its training}, for all of RUNS; in one kernel they are trained once.

    Args:
        ranks: Ranks, as `course.lab.Ranks` makes them, that share the work.
    """
    if not _done:
        for share in ranks.run(my_share, list(RUNS)):
            _done.update(share)
    return {run: _done[run] for run in RUNS}
