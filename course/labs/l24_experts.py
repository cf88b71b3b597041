"""Lesson 24: the tensors of a small layer of experts, and its numbers beside one process.

Four ranks with 24 tokens each, 8 experts, 16 features, 32 inside an expert, all in float64. The
loss of a rank is the mean over its tokens, that of the step the mean over the ranks.

Held by: tests/ranks/test_l24_labs.py
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from labcode.comm.counting import counted
from labcode.comm.grid import Grid
from labcode.config import GPTConfig, ParallelConfig
from labcode.models.gpt import GPT
from labcode.models.moe import MoE
from labcode.models.parallelize import parallelize
from labcode.parallel.experts import divide_experts
from labcode.parallel.sharding import gradient_axes, placement
from labcode.parallel.zero.parameters import FullyShardedModule
from labcode.topology import GridShape

HIDDEN = 16
FFN = 32
EXPERTS = 8
TOKENS = 24  # of a rank
LOADS = ("as the router chooses", "expert 3 gets nothing", "all choose expert 3 first")

Layer = Callable[..., torch.Tensor]
Gradients = dict[str, torch.Tensor | None]


class Tensors(NamedTuple):
    """What a layer reads.

    Args:
        x, target: [T, H]
        router: [H, E]
        up: [E, H, F]
        down: [E, F, H]
    """

    x: torch.Tensor
    target: torch.Tensor
    router: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor


def tensors(load: str = LOADS[0], num_ranks: int = 4) -> Tensors:
    """The tokens of all ranks and the whole weights, the same in every process.

    The first feature of each token is 1, so that the first row of the router adds a number to the
    score of an expert for every token.
    """
    generator = torch.Generator().manual_seed(24)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    router = draw(HIDDEN, EXPERTS) / 4
    up = draw(EXPERTS, HIDDEN, FFN) / 4
    down = draw(EXPERTS, FFN, HIDDEN) / 16  # so small that the router's gradient is, too
    x = draw(num_ranks * TOKENS, HIDDEN)
    x[:, 0] = 1.0
    router[0] = 0.0
    router[0, 3] = {LOADS[0]: 0.0, LOADS[1]: -50.0, LOADS[2]: 12.0}[load]
    return Tensors(x, draw(num_ranks * TOKENS, HIDDEN), router, up, down)


def loss_of(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The mean over tokens and features of the squared distance."""
    return (y - target).square().mean()


def part_of_rank(whole: Tensors, tokens: int, experts: int, grid: Grid) -> Tensors:
    """This rank's tokens and experts, as leaves of the graph.

    The tokens want a gradient too, as in a model with layers below. Else a rank whose experts are
    left out would have no graph at all, and be missing in the all-to-alls of backward.

    Args:
        whole: All tokens and weights.
        tokens: Number of parts into which the tokens are cut.
        experts: Number of parts into which the experts are cut.
        grid: Says which of them are this rank's.
    """
    own_tokens = grid.coord("dp")
    own_experts = own_tokens % experts
    return Tensors(
        whole.x.chunk(tokens)[own_tokens].clone().requires_grad_(),
        whole.target.chunk(tokens)[own_tokens].clone(),
        whole.router.clone().requires_grad_(),
        whole.up.chunk(experts)[own_experts].clone().requires_grad_(),
        whole.down.chunk(experts)[own_experts].clone().requires_grad_(),
    )


def step(layer: Layer, ep: int = 4, load: str = LOADS[0], k: int = 2) -> Gradients:
    """Forward and backward on this rank: its loss, and the gradients that its backward gives.

    Args:
        layer: `layer(x, router, up, down, k, group)`.
        ep: Number of ranks over which the experts are divided.
        load: One of `LOADS`.
        k: Experts of a token.
    """
    grid = Grid.create(GridShape(dp=4, ep=ep))
    own = part_of_rank(tensors(load), 4, ep, grid)
    y = layer(own.x, own.router, own.up, own.down, k, grid.group("ep"))
    loss = loss_of(y, own.target)
    loss.backward()
    return {
        "loss": loss.detach(),
        "x": own.x.grad,
        "router": own.router.grad,
        "up": own.up.grad,
        "down": own.down.grad,
    }


def with_gradients(
    layer: Layer, ep: int
) -> tuple[list[torch.nn.Parameter], list[torch.nn.Parameter]]:
    """(the router, this rank's experts) as parameters with what backward gives them."""
    found = step(layer, ep)
    params = []
    for name in ("router", "up", "down"):
        grad = there(found[name])
        param = torch.nn.Parameter(torch.zeros_like(grad))
        param.grad = grad
        params.append(param)
    return params[:1], params[1:]


def rows_sent(rank: int, load: str = LOADS[0], k: int = 2) -> list[int]:
    """How many rows this rank sends to each of four ranks that keep two experts each."""
    whole = tensors(load)
    chosen = (whole.x.chunk(4)[rank] @ whole.router).topk(k, -1).indices
    counts = torch.bincount(chosen.flatten(), minlength=EXPERTS)
    return counts.view(4, -1).sum(1).tolist()


KINDS = ("None", "zeros", "other")


def kind_of(grad: torch.Tensor | None) -> str:
    """One of `KINDS`."""
    if grad is None:
        return "None"
    return "other" if grad.any() else "zeros"


def alone(layer_alone: Layer, load: str = LOADS[0], k: int = 2) -> dict[str, torch.Tensor]:
    """The layer on one process that has all tokens and all experts.

    Args:
        layer_alone: `layer(x, router, up, down, k)`.
        load, k: As in `step`.
    """
    whole = tensors(load)
    read = [whole.x, whole.router, whole.up, whole.down]
    read = [each.clone().requires_grad_() for each in read]
    loss = loss_of(layer_alone(*read, k), whole.target)
    loss.backward()
    found = {"loss": loss.detach()}
    for name, weight in zip(("x", "router", "up", "down"), read, strict=True):
        assert weight.grad is not None
        found[name] = weight.grad
    return found


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The length of the difference, in lengths of what is expected."""
    return ((found - expected).norm() / expected.norm()).item()


def joined(results: Iterable[Gradients], ep: int = 4) -> dict[str, torch.Tensor]:
    """The loss and the gradients of a step, from what four ranks found: summed where it belongs."""
    of_ranks = list(results)
    mean = {}
    for name in ("loss", "router"):
        mean[name] = torch.stack([there(each[name]) for each in of_ranks]).mean(0)
    mean["x"] = torch.cat([there(each["x"]) for each in of_ranks]) / len(of_ranks)
    for name in ("up", "down"):
        parts = []
        for number in range(ep):
            replicas = [there(each[name]) for each in of_ranks[number::ep]]
            parts.append(torch.stack(replicas).sum(0) / len(of_ranks))
        mean[name] = torch.cat(parts)
    return mean


def there(value: torch.Tensor | None) -> torch.Tensor:
    """A gradient that is not None."""
    assert value is not None
    return value


def errors_on_tp(layer: Layer, truth: dict[str, torch.Tensor], k: int = 2) -> dict[str, float]:
    """What tp = 2 and dp = 2 make of the gradients of router and tokens, beside one process.

    The router's gradient is summed over tp and averaged over dp.

    Args:
        layer: `layer(x, router, up, down, k, tp)` for a part of the tokens and of the features.
        truth: The gradients of one process.
        k: Experts of a token.

    Returns:
        {"router": how many times as long, "router is off": relative error, "x is off": relative
        error of what the layers below would get}
    """
    grid = Grid.create(GridShape(dp=2, tp=2))
    dp = grid.coord("dp")
    tp = grid.coord("tp")
    size = grid.size("tp")
    whole = tensors()
    x = whole.x.chunk(2)[dp].chunk(size)[tp].clone().requires_grad_()
    target = whole.target.chunk(2)[dp].chunk(size)[tp]
    router = whole.router.clone().requires_grad_()
    up = whole.up.chunk(size, 2)[tp]
    down = whole.down.chunk(size, 1)[tp]
    loss = loss_of(layer(x, router, up, down, k, grid.group("tp")), target) / size
    loss.backward()
    grad = there(router.grad)
    dist.all_reduce(grad, group=grid.group("tp"))
    dist.all_reduce(grad, group=grid.group("dp"))
    grad /= grid.size("dp")
    # the loss of one process is the mean over the tokens of both ranks of dp
    expected_x = truth["x"].chunk(2)[dp].chunk(size)[tp] * grid.size("dp")
    return {
        "router": round((grad.norm() / truth["router"].norm()).item(), 9),
        "router is off": relative_error(grad, truth["router"]),
        "x is off": relative_error(there(x.grad), expected_x),
    }


# ---- where each tensor of a model lives

CONFIGURATIONS = {
    "dp 4": {"dp": 4},
    "ep 4": {"dp": 4, "ep": 4},
    "ep 2 x tp 2": {"dp": 2, "ep": 2, "tp": 2, "sequence_parallel": True},
    "ep 2 x ZeRO-3": {"dp": 4, "ep": 2, "zero_stage": 3},
}
WEIGHTS = (
    "blocks.0.attention.qkv.weight",
    "blocks.0.norm2.weight",
    "blocks.0.mlp.router.weight",
    "blocks.0.mlp.experts.up",
    "blocks.0.mlp.experts.down",
)


def placements(name: str) -> dict[str, tuple[str, str]]:
    """{weight: (where it lives, the axes over which its gradient is summed)} of a small GPT.

    Args:
        name: One of `CONFIGURATIONS`; its grid has four ranks.
    """
    config = GPTConfig(
        vocab_size=32,
        num_layers=1,
        num_heads=4,
        hidden_size=HIDDEN,
        context_length=16,
        norm="rms",
        mlp="swiglu",
        bias=False,
        num_experts=EXPERTS,
        expert_ffn_size=FFN,
    )
    parallel = ParallelConfig(**CONFIGURATIONS[name])
    shape = parallel.shape(4)
    with torch.device("meta"):
        model = GPT(config)
    made = parallelize(model, Grid.create(shape), parallel, seed=0)
    found = {}
    for weight in WEIGHTS:
        sharding = made.shardings[weight]
        axes = gradient_axes(sharding, shape)
        found[weight] = placement(sharding, shape), " and ".join(axes) or "nothing"
    return found


# ---- experts that stay or that are gathered


def bytes_of(way: str, num_tokens: int, num_experts: int = 4, k: int = 2) -> dict[str, int]:
    """{collective: bytes of its tensors} of one forward and backward of a layer, on this rank.

    Args:
        way: "rows travel", with ep = 4; or "weights travel", with ZeRO-3 over the four ranks.
        num_tokens: Number of tokens on this rank.
        num_experts: E
        k: Experts of a token.
    """
    grid = Grid.create(GridShape(dp=4))
    torch.manual_seed(0)
    layer: Any = MoE(HIDDEN, FFN, num_experts, k)
    for param in layer.parameters():
        torch.nn.init.normal_(param, std=0.1)
    if way == "rows travel":
        divide_experts(layer.experts, grid.group("dp"), grid.group("tp"))
    else:
        # A rank keeps some rows of all experts, and gathers the rest each time that it uses them.
        experts = layer.experts
        layer.experts = FullyShardedModule(experts, grid.group("dp"), units=[experts])
    x = torch.randn(1, num_tokens, HIDDEN, requires_grad=True)
    routing = layer.router(x)
    with counted() as calls:
        layer.experts(x, routing).sum().backward()
    found: dict[str, int] = {}
    for call in calls:
        found[call.kind] = found.get(call.kind, 0) + call.num_bytes
    return found


# ---- patients

CAUSES = {
    "group": "the gradients of experts are divided by the replicas, and not by all of dp",
    "norm": "the norm counts the experts of this rank alone",
    "detached": "the router's weights travel by a collective that autograd does not know",
    "order": "rows come back in another order than they left",
    "skipped": "a rank whose experts get no rows leaves them out of the graph",
    "splits": "backward sends with the splits of forward",
}


def patient(name: str, layer: Layer, load: str = LOADS[0]) -> Gradients:
    """What one of the patients "A", "B" and "C" gives on this rank, gradients summed already.

    Args:
        name: Name of the patient.
        layer: Exercise 24.3, finished.
        load: One of `LOADS`.
    """
    found = step(PATIENTS[name](layer), 2, load, k=1)
    grid = Grid.create(GridShape(dp=4, ep=2))
    shares = {"loss": 4, "router": 4, "up": 4, "down": 4}
    if name == "A":
        shares |= {"up": grid.size("edp"), "down": grid.size("edp")}
    for key, share in shares.items():
        group = grid.group("edp" if key in ("up", "down") else "dp")
        value = found[key]
        if value is not None:
            dist.all_reduce(value, group=group)
            value /= share
    return found


def _as_it_is(layer: Layer) -> Layer:
    return layer


def _with_gathered_weights(layer: Layer) -> Layer:
    """The scores of all ranks are gathered, and this rank takes its own out of them."""

    def forward(
        x: torch.Tensor,
        router: torch.Tensor,
        up: torch.Tensor,
        down: torch.Tensor,
        k: int,
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        y = layer(x, router.detach(), up, down, k, group)
        scores = x @ router
        all_scores = [torch.empty_like(scores) for _ in range(group.size())]
        dist.all_gather(all_scores, scores.detach(), group=group)
        weight = all_scores[group.rank()].softmax(-1).amax(-1, keepdim=True)
        return y / weight * weight

    return forward


def _without_idle_experts(layer: Layer) -> Layer:
    """A rank that gets no rows does not call its experts."""

    def forward(
        x: torch.Tensor,
        router: torch.Tensor,
        up: torch.Tensor,
        down: torch.Tensor,
        k: int,
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        chosen = (x @ router).topk(k, -1).indices.flatten()
        rows = torch.bincount(chosen // len(up), minlength=group.size())
        dist.all_reduce(rows, group=group)
        if rows[group.rank()] == 0:
            up, down = up.detach(), down.detach()
        return layer(x, router, up, down, k, group)

    return forward


PATIENTS: dict[str, Callable[[Layer], Layer]] = {
    "A": _as_it_is,
    "B": _with_gathered_weights,
    "C": _without_idle_experts,
}


def chart(results: list[Gradients], truth: dict[str, torch.Tensor], ep: int = 2) -> dict[str, Any]:
    """What is written at the bed of a patient: its numbers beside one process.

    Returns:
        {"loss": relative error, name: how many times as long as it should be, of each rank}; None
        where a rank has no gradient.
    """
    found: dict[str, Any] = {"loss": relative_error(there(results[0]["loss"]), truth["loss"])}
    for name in ("router", "up", "down"):
        times = []
        for rank, each in enumerate(results):
            whole = truth[name]
            if name != "router":
                whole = whole.chunk(ep)[rank % ep]
            times.append(_times(each[name], whole))
        found[name] = times
    return found


def _times(found: torch.Tensor | None, expected: torch.Tensor) -> float | None:
    """How many times as long as it should be; 0 if both are zero, None if there is none."""
    if found is None:
        return None
    if not expected.any():
        return 0.0 if not found.any() else float("inf")
    return round((found.norm() / expected.norm()).item(), 3)


def told(times: list[float | None]) -> str:
    """One number if all ranks have the same, else that of each."""
    words = ["none" if each is None else f"{each:g}" for each in times]
    return words[0] if len(set(words)) == 1 else " | ".join(words)
