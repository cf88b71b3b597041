"""Lesson 26: a GPT that closes some brackets, recorded runs, and two fleets with their patients.

One process trains by rewards in `train`; four ranks, two that learn with FSDP and two that generate
with tp, in `patient`.

Held by: tests/ranks/test_l26_labs.py
"""

import copy
import dataclasses
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from labcode.comm.grid import Grid
from labcode.config import GPTConfig, LoraConfig, ParallelConfig
from labcode.models.generate import Generated, generate
from labcode.models.gpt import GPT
from labcode.models.layers import Block, CoreAttention, initialize
from labcode.models.lora import add_adapters, is_adapter, merged
from labcode.models.parallelize import parallelize
from labcode.parallel import reshard
from labcode.parallel.model import ParallelModel
from labcode.topology import GridShape
from labcode.train import brackets, grpo, rollouts

CONFIG = GPTConfig(
    vocab_size=brackets.VOCAB_SIZE, context_length=16, num_layers=2, num_heads=4, hidden_size=32
)
DEPTH = 6  # brackets of a prompt
NUM_NEW = DEPTH + 1  # tokens of an answer, with its end
NUM_PROMPTS = 16
GROUP = 16  # answers to each prompt
LEARNING_RATE = 1e-3
SUPERVISED_STEPS = 90
RECORDED = Path(__file__).resolve().parents[2] / "labcode" / "assets" / "brackets_rewards.json"
LAGS = (0, 1, 4, 16)
STEPS = 60  # of a recorded run
MEAN_OVER = 5  # steps, of a point in a figure

Loss = Callable[..., torch.Tensor]


# ---- one process


@functools.cache
def _weights() -> dict[str, torch.Tensor]:
    model = initialize(GPT(CONFIG), 1).double()
    random = torch.Generator().manual_seed(1)
    brackets.supervised_start(model, SUPERVISED_STEPS, DEPTH, random)
    return model.state_dict()


def started(dtype: torch.dtype = torch.float64) -> GPT:
    """A GPT after some supervised steps, which closes about half of the prompts.

    In float64, so that answers are drawn alike on every machine.
    """
    model = GPT(CONFIG).double()
    model.load_state_dict(_weights())
    return model.to(dtype)


def draw(model: GPT, random: torch.Generator, num_prompts: int = NUM_PROMPTS) -> Generated:
    """GROUP answers to each of some prompts; those to one prompt follow each other."""
    prompts = brackets.draw_prompts(num_prompts, DEPTH, random).repeat_interleave(GROUP, 0)
    return generate(model, prompts, NUM_NEW, generator=random, end=brackets.END)


def rewards_of(tokens: torch.Tensor) -> torch.Tensor:
    """[B, S + T] prompts and answers -> [prompts, G] rewards."""
    return brackets.rewards(tokens[:, :DEPTH], tokens[:, DEPTH:]).view(-1, GROUP)


def log_probs(model: GPT, tokens: torch.Tensor) -> torch.Tensor:
    """[B, S + T] -> [B, T]: log p of each new token; `token_log_probs` for one process."""
    logits = model(tokens[:, :-1])[:, -NUM_NEW:]
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    new = tokens[:, -NUM_NEW:, None]
    return wide.log_softmax(-1).gather(-1, new).squeeze(-1)


class Row(NamedTuple):
    """A step of a run.

    Args:
        reward: Mean over all answers.
        off: Mean of |ratio - 1| over the tokens.
        outside: The fraction of tokens whose ratio is outside of 0.8 to 1.2.
    """

    reward: float
    off: float
    outside: float


def ratios(new: torch.Tensor, old: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """The ratios of the tokens that count, one after the other."""
    return (new.detach() - old).exp()[counts]


def mean_off(ratio: torch.Tensor) -> float:
    """The mean of |ratio - 1|."""
    return (ratio - 1).abs().double().mean().item()


def fraction_outside(ratio: torch.Tensor) -> float:
    """The fraction of ratios outside of 0.8 to 1.2, which the loss clips."""
    return ((ratio < 0.8) | (ratio > 1.2)).double().mean().item()


def train(steps: int, seed: int, lag: int = 0) -> list[Row]:
    """Train by rewards, with answers of a generator whose weights are `lag` updates old.

    Args:
        steps: Updates.
        seed: Of prompts and answers.
        lag: How many updates the generator is behind, once there are so many.
    """
    learner = started()
    generator = started()
    optimizer = torch.optim.AdamW(learner.parameters(), lr=LEARNING_RATE)
    random = torch.Generator().manual_seed(seed)
    versions = [copy.deepcopy(learner.state_dict())]
    options = grpo.GRPO(average="token")
    rows = []
    for step in range(steps):
        generator.load_state_dict(versions[max(0, step - lag)])
        drawn = draw(generator, random)
        rewards = rewards_of(drawn.tokens)
        advantage = grpo.advantages(rewards).flatten()
        weights = grpo.token_weights(drawn.counts, options.average)
        new = log_probs(learner, drawn.tokens)
        grpo.policy_loss(new, drawn.log_probs, advantage, weights, options).backward()
        optimizer.step()
        optimizer.zero_grad()
        versions.append(copy.deepcopy(learner.state_dict()))
        ratio = ratios(new, drawn.log_probs, drawn.counts)
        rows.append(Row(rewards.mean().item(), mean_off(ratio), fraction_outside(ratio)))
    return rows


@functools.cache
def recorded() -> dict[int, list[list[Row]]]:
    """{lag: runs of several seeds}, by course/labs/l26_record.py."""
    found = {}
    for lag, runs in json.loads(RECORDED.read_text())["runs"].items():
        found[int(lag)] = [_as_rows(run) for run in runs]
    return found


def _as_rows(run: Sequence[Sequence[float]]) -> list[Row]:
    return [Row(*row) for row in run]


def smoothed(values: Sequence[float]) -> list[float]:
    """Means over MEAN_OVER steps that follow each other."""
    firsts = range(0, len(values), MEAN_OVER)
    return [sum(values[first : first + MEAN_OVER]) / MEAN_OVER for first in firsts]


def middles(steps: int = STEPS) -> list[float]:
    """The steps at which `smoothed` points stand."""
    return [first + MEAN_OVER / 2 for first in range(0, steps, MEAN_OVER)]


def rewards_by_seed(lag: int) -> torch.Tensor:
    """[seeds, points]: smoothed rewards of the recorded runs."""
    points = []
    for run in recorded()[lag]:
        rewards = [row.reward for row in run]
        points.append(smoothed(rewards))
    return torch.tensor(points)


def band(lag: int = 0) -> tuple[list[float], list[float]]:
    """(lowest, highest) smoothed reward over the recorded seeds."""
    by_seed = rewards_by_seed(lag)
    return by_seed.amin(0).tolist(), by_seed.amax(0).tolist()


def mean_rewards(lag: int) -> list[float]:
    """The mean over the recorded seeds."""
    return rewards_by_seed(lag).mean(0).tolist()


def mean_of(lag: int, what: str) -> float:
    """The mean of a column over steps and seeds of the recorded runs, without the first 16 steps.

    Args:
        lag: One of LAGS.
        what: "reward", "off" or "outside".
    """
    values = []
    for run in recorded()[lag]:
        values += [getattr(row, what) for row in run[max(LAGS) :]]
    return sum(values) / len(values)


DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
}


def disagreement(learner: str, generator: str) -> tuple[float, torch.Tensor]:
    """(largest |log p - log p'|, ratios) of the same weights in two dtypes, before any update.

    Args:
        learner, generator: Names of dtypes.
    """
    drawn = draw(started(DTYPES[generator]), torch.Generator().manual_seed(5), 64)
    with torch.no_grad():
        new = log_probs(started(DTYPES[learner]), drawn.tokens).double()
    old = drawn.log_probs.double()
    off = ((new - old).abs() * drawn.counts).max().item()
    return off, ratios(new, old, drawn.counts)


ANSWERS_PACKED = 64


def attention_ways(dtype: str) -> dict[str, torch.Tensor]:
    """{how the learner computes: ratios of answers to those of the padded batch, fused kernel}.

    Packed answers stand one behind the other in one row, each up to its end and with positions of
    its own; a mask keeps them apart.

    Args:
        dtype: Name of a dtype.
    """
    model = started(DTYPES[dtype])
    drawn = draw(model, torch.Generator().manual_seed(5), ANSWERS_PACKED // GROUP)
    found = {}
    with torch.no_grad():
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            padded = log_probs(model, drawn.tokens)[drawn.counts].double()
            packed = packed_log_probs(model, drawn)
        with sdpa_kernel(SDPBackend.MATH):
            found["another kernel"] = log_probs(model, drawn.tokens)[drawn.counts]
        found["packed"] = packed
        found["packed, no mask"] = packed_log_probs(model, drawn, apart=False)
    return {way: (values.double() - padded).exp() for way, values in found.items()}


def packed_log_probs(model: GPT, drawn: Generated, apart: bool = True) -> torch.Tensor:
    """log p of the tokens that count, one after the other, from one row that has all answers.

    Args:
        model: Whose; it stays as it is.
        drawn: Prompts with their answers.
        apart: Whether a token sees those of its own answer alone, and not those before.
    """
    length = DEPTH + drawn.counts.sum(1)  # [B]
    places = torch.arange(DEPTH + NUM_NEW)
    row = drawn.tokens[places < length[:, None]]  # [sum of lengths]
    positions = places.expand(len(length), -1)[places < length[:, None]]
    number = torch.arange(len(length)).repeat_interleave(length)
    mask = torch.ones(len(row), len(row), dtype=torch.bool).tril()
    if apart:
        mask &= number[:, None] == number
    packing = copy.deepcopy(model)
    packing.config = dataclasses.replace(model.config, context_length=len(row))
    for block in packing.blocks:
        assert isinstance(block, Block)
        block.attention.core = _Masked(mask)
    logits = packing(row[None], positions)[0]
    new = (positions >= DEPTH).nonzero().squeeze(1)
    wide = logits[new - 1].to(torch.promote_types(logits.dtype, torch.float32))
    return wide.log_softmax(-1).gather(-1, row[new, None]).squeeze(-1)


class _Masked(CoreAttention):
    """Attention in which a mask says who sees whom."""

    def __init__(self, mask: torch.Tensor) -> None:
        super().__init__(causal=False)
        self.mask = mask

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask)


def simulated_step_s(draw_s: float, learn_s: float, exchange_s: float, steps: int = 1000) -> float:
    """Seconds of a step when a batch is drawn while one learns from the one before.

    Args:
        draw_s, learn_s, exchange_s: Of one batch, one update, and one exchange of weights.
        steps: Simulated; the first batch, for which the learner waits, is not counted.
    """
    generator_s = draw_s  # when each is free
    learner_s = draw_s
    first_s = draw_s
    for _ in range(steps):
        generator_s += draw_s
        learner_s += learn_s
        meet_s = max(generator_s, learner_s) + exchange_s  # both take part
        generator_s = meet_s
        learner_s = meet_s
    return (learner_s - first_s) / steps


# ---- two fleets

LEARNER = GridShape(dp=2)
GENERATOR = GridShape(tp=2)
FSDP = ParallelConfig(data_parallel="labcode", zero_stage=3)
PLAIN = ParallelConfig(data_parallel="labcode")


def other_weights() -> GPT:
    """What a generator has before it is given anything: other random numbers."""
    return initialize(GPT(CONFIG), 2).double()


def part_of_model(is_learner: bool, grid: Grid) -> ParallelModel:
    """This rank's part: of the started model where it learns, else of one with other weights."""
    if is_learner:
        return parallelize(started(), grid, FSDP)
    return parallelize(other_weights(), grid, PLAIN)


def plan_of(model: ParallelModel, is_learner: bool) -> list[reshard.Move]:
    """The moves from the learner's ranks to the generator's; all ranks call it."""
    boxes = reshard.boxes_of_model(model)
    return reshard.plan(*reshard.layouts_of_fleets(boxes, is_learner, _world()))


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    return world


def draw_and_share(
    model: ParallelModel, is_learner: bool, version: int, random: torch.Generator
) -> rollouts.Batch:
    """Answers that the generator draws, on all ranks of both fleets."""
    batch = rollouts.empty(NUM_PROMPTS * GROUP, DEPTH, NUM_NEW)
    if not is_learner:
        prompts = brackets.draw_prompts(NUM_PROMPTS, DEPTH, random).repeat_interleave(GROUP, 0)
        batch = rollouts.draw(model, prompts, NUM_NEW, random, end=brackets.END, version=version)
    return rollouts.share(batch, LEARNER.world_size, _world())


def slices_off(model: ParallelModel, whole: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """{weight: how far this rank's part is from its slice of the whole, in lengths of that}."""
    found = {}
    for name, weight in model.weights.items():
        expected = model.shardings[name].own(whole[name], model.grid)
        length = expected.norm().clamp(min=1e-300)
        found[name] = ((weight.detach() - expected).norm() / length).item()
    return found


# ---- patients

CAUSES = {
    "shard": "of some weights a learner's shard is sent as if the receiver needed just that",
    "adapters": "the learner trains adapters, and they are not merged before weights are sent",
    "stale": "the weights that arrive are those of an earlier update",
    "dtype": "the generator computes in bfloat16",
    "temperature": "the generator's log-probs are those of another temperature",
    "half": "one of the generator's ranks is left out when weights are sent",
}
LORA = LoraConfig(rank=4, alpha=16.0)
PATIENT_STEPS = 4
SHOWN = {  # in a patient's numbers
    "embedding": "embed.weight",
    "norm": "blocks.0.norm1.weight",
    "qkv": "blocks.0.attention.qkv.weight",
    "its bias": "blocks.0.attention.qkv.bias",
    "proj": "blocks.0.attention.proj.weight",
    "up": "blocks.0.mlp.up.weight",
}


class Chart(NamedTuple):
    """What is written at the bed of a patient, by one rank.

    Args:
        is_learner: Whose numbers these are.
        rewards: Mean reward of each step.
        off: Mean |ratio - 1| of each step; on the generator's ranks empty.
        differences: {weight: relative distance of this rank's part from the learner's slice}; on
            the learner's ranks empty.
    """

    is_learner: bool
    rewards: list[float]
    off: list[float]
    differences: dict[str, float]


def patient(name: str) -> Chart:
    """Some steps of two fleets, one of which has a mistake; then weights are sent once more.

    Each step has the same prompts and the same random numbers, so that a generator whose weights do
    not change gives the same answers.

    Args:
        name: "healthy", or that of a patient: "X", "Y" or "Z".
    """
    number, grid = Grid.fleets(LEARNER, GENERATOR)
    is_learner = number == 0
    has_adapters = name == "Y"
    model = _with_adapters(grid) if has_adapters and is_learner else part_of_model(is_learner, grid)
    moves = plan_of(model, is_learner)
    trained = [weight for weight in model.weights.values() if weight.requires_grad]
    rate = 3 * LEARNING_RATE if has_adapters else LEARNING_RATE
    optimizer = torch.optim.AdamW(trained, lr=rate)
    rewards = []
    off = []
    for step in range(PATIENT_STEPS):
        _send(name, model, moves, step)
        random = torch.Generator().manual_seed(3)
        batch = draw_and_share(model, is_learner, step, random)
        reward = rewards_of(batch.tokens)
        rewards.append(reward.mean().item())
        if is_learner:
            with torch.no_grad():
                new = grpo.token_log_probs(model, batch.tokens, NUM_NEW)
            off.append(mean_off(ratios(new, batch.log_probs, batch.counts)))
            grpo.learn(model, optimizer, batch, reward, grpo.GRPO(average="token"))
    _send(name, model, moves, PATIENT_STEPS)
    whole = _whole_weights(model, is_learner, has_adapters)
    return Chart(is_learner, rewards, off, {} if is_learner else slices_off(model, whole))


def _with_adapters(grid: Grid) -> ParallelModel:
    return parallelize(add_adapters(started(), LORA, seed=1), grid, FSDP)


def _send(name: str, model: ParallelModel, moves: Sequence[reshard.Move], step: int) -> None:
    """Weights from the learner to the generator, in the way of a patient."""
    if name == "Z" and step not in (0, 1):
        return
    parts = reshard.parts_of(model)
    reshard.exchange(moves, parts, step, _world(), torch.float64)
    if name == "X":
        rank = dist.get_rank()
        for weight, part in parts.items():
            if "qkv.weight" in weight:
                if rank < 2:
                    dist.send(part.contiguous(), rank + 2)
                else:
                    arrived = torch.empty_like(part)
                    dist.recv(arrived, rank - 2)
                    part.copy_(arrived)


def _whole_weights(
    model: ParallelModel, is_learner: bool, has_adapters: bool
) -> dict[str, torch.Tensor]:
    """The learner's weights as they ought to be used, on every rank."""
    told: list[Any] = [None]
    if is_learner:
        whole = {name: weight.clone() for name, weight in model.full_state_dict()}
        if has_adapters:
            whole = merged(whole, LORA)
        told = [whole]
    dist.broadcast_object_list(told, src=0)
    return {name: weight for name, weight in told[0].items() if not is_adapter(name)}


def told(charts: Sequence[Chart]) -> list[str]:
    """The numbers of a patient as lines."""
    lines = [
        f"mean |ratio - 1|  {'  '.join(map(_rounded, charts[0].off))}",
        f"reward            {'  '.join(f'{value:.2f}' for value in charts[0].rewards)}",
    ]
    for rank, chart in enumerate(charts):
        if chart.is_learner:
            continue
        shown = [f"{word} {_rounded(chart.differences[name])}" for word, name in SHOWN.items()]
        lines.append(f"off on rank {rank}     {', '.join(shown)}")
    return lines


def _rounded(value: float) -> str:
    """A number to one digit; what is below 1e-12 is rounding, and 0 is exact."""
    if value == 0:
        return "0"
    return "<1e-12" if value < 1e-12 else f"{value:.1g}"
