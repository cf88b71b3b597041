"""Checks of lesson 10, sequence and context parallelism. The text of each assertion is a hint."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from labcode.comm.counting import counted, totals
from labcode.perf.flops import training_flops_per_sample
from labcode.perf.memory import model_activations
from labcode.perf.saved_bytes import saved_bytes
from labcode.pool.ranks import Ranks
from labcode.recipes import gpt_shape
from labcode.teach.check import Exercise, due
from labcode.topology import GridShape
from labcode.units import si

EXERCISES = {
    "10.1": Exercise("now put the numbers of the table in"),
    "10.2": Exercise("right gradients, a quarter of the bytes"),
    "10.3": Exercise("blocks of any size, in any order"),
    "10.4": Exercise("the same work for 2, 4 and 8 ranks"),
    "10.5": Exercise("it fits, and most of the time is spent computing"),
}

TOLERANCE = 1e-9

# ---- 10.1

Run = tuple[int, float]  # GPUs, samples/s
RUNS: tuple[tuple[Run, Run], ...] = (
    ((4, 93.1), (16, 125.2)),
    ((1, 10.0), (2, 20.0)),
    ((8, 50.0), (24, 120.0)),
)


def published(
    efficiency: Callable[[Run, Run], float], whole_share: Callable[[float, int], float]
) -> None:
    """The learner's two formulas for reading published tables.

    Args:
        efficiency: `efficiency(before, after)` of two pairs (GPUs, samples/s).
        whole_share: `whole_share(ratio, t)`: the share of the memory that tensor parallelism over
            t ranks leaves whole, when `ratio` of the memory remains.
    """
    for before, after in RUNS:
        _check_efficiency(before, after, due(efficiency(before, after)))
    for t in (2, 4, 8):
        _check_whole_share(whole_share, t)


def _check_efficiency(before: Run, after: Run, found: float) -> None:
    case = f"{before} to {after}: "
    speed_up = after[1] / before[1]
    times_gpus = after[0] / before[0]
    if _near(found, speed_up / times_gpus):
        return
    # (2, 20.0) from one GPU: some wrong formulas are right there, so the hints come after
    assert not _near(found, speed_up), (
        case + f"{found:.3g} is the speed-up; how many times as many GPUs did it take?"
    )
    assert not _near(found, speed_up / after[0]), (
        case + f"the comparison is with {before[0]} GPUs, not with one"
    )
    assert not _near(found, times_gpus / speed_up), case + f"{found:.3g} is upside down"
    raise AssertionError(
        case + f"{found:.4g}: divide the speed-up by how many times as many GPUs there are"
    )


def _check_whole_share(whole_share: Callable[[float, int], float], t: int) -> None:
    everything = due(whole_share(1.0, t))
    assert _near(everything, 1), (
        f"what keeps all of its memory on {t} ranks is whole: "
        f"the share is 1, yours {everything:.3g}"
    )
    nothing = due(whole_share(1 / t, t))
    assert abs(nothing) < TOLERANCE, (
        f"what keeps 1/{t} on {t} ranks is cut entirely: the share is 0, yours {nothing:.3g}"
    )
    ratio = 0.3 + 0.7 / t
    found = due(whole_share(ratio, t))
    assert _near(found, 0.3), (
        f"whole 0.3, the rest cut by {t}: ratio {ratio:.4g}, and your share is {found:.3g}"
    )


def _near(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-6)


# ---- 10.2

BATCH = 2
TOKENS = 32
WIDTH = 8
COLUMNS = 4  # output features of each rank


@dataclass(frozen=True)
class _Gathered:
    """What the learner's Function did on one rank.

    Args:
        kept_bytes: Saved for backward, without weights.
        x_off, weight_off: Largest error of each gradient.
        x_off_if_own: Largest difference of the gradient of x from that of this rank's columns
            alone, which is what one gets who forgets the sum over the ranks.
        gathers: All-gathers that backward starts.
    """

    kept_bytes: int
    x_off: float
    weight_off: float
    x_off_if_own: float
    gathers: int


def _gathered(rank: int, again: type[torch.autograd.Function]) -> _Gathered:
    """The learner's Function on this rank's tokens and columns, beside `F.linear` on all."""
    p = dist.get_world_size()
    draw = torch.Generator().manual_seed(3)
    size = (BATCH, TOKENS, WIDTH)
    x = torch.randn(*size, generator=draw, dtype=torch.float64)
    weight = torch.randn(*size, generator=draw, dtype=torch.float64)[0, : COLUMNS * p].clone()
    grad = torch.randn(*size, generator=draw, dtype=torch.float64)
    grad = grad[..., :COLUMNS].repeat(1, 1, p)  # [B, S, p*COLUMNS]

    whole_x = x.clone().requires_grad_()
    whole_weight = weight.clone().requires_grad_()
    F.linear(whole_x, whole_weight).backward(grad)
    assert whole_x.grad is not None and whole_weight.grad is not None

    own_tokens = slice(rank * TOKENS // p, (rank + 1) * TOKENS // p)
    own_columns = slice(rank * COLUMNS, (rank + 1) * COLUMNS)
    own_x = x[:, own_tokens].clone().requires_grad_()
    own_weight = weight[own_columns].clone().requires_grad_()
    own_grad = grad[..., own_columns].contiguous()
    weights = torch.nn.ParameterList([torch.nn.Parameter(own_weight)])
    with saved_bytes(weights) as saved:
        y = again.apply(own_x, own_weight, dist.group.WORLD)
    kept_bytes = saved.total()
    assert y is not None and y.shape == (BATCH, TOKENS, COLUMNS), "forward returns [B, S, F/p]"
    with counted() as backward:
        y.backward(own_grad)

    from_own_columns = (own_grad @ weight[own_columns])[:, own_tokens]
    return _Gathered(
        kept_bytes=kept_bytes,
        x_off=_largest_error(own_x.grad, whole_x.grad[:, own_tokens]),
        weight_off=_largest_error(own_weight.grad, whole_weight.grad[own_columns]),
        x_off_if_own=_largest_error(own_x.grad, from_own_columns),
        gathers=totals(backward).get("all_gather", (0, 0))[0],
    )


def _largest_error(found: Tensor | None, expected: Tensor) -> float:
    assert found is not None, "backward returns a gradient for x and one for weight"
    return (found - expected).abs().max().item()


def gathers_again(again: type[torch.autograd.Function], ranks: Ranks) -> None:
    """The learner's Function keeps only its part of x and gathers it a second time in backward.

    Args:
        again: Called as `apply(x, weight, group)`.
        ranks: Where it runs.
    """
    found = ranks.run(_gathered, again)[0]
    p = ranks.n
    assert found.x_off_if_own > TOLERANCE or p == 1, (
        "the gradient of x is this rank's alone: the other ranks used these tokens as well"
    )
    assert found.weight_off < TOLERANCE, (
        f"the gradient of the weight is off by {found.weight_off:.2g}: "
        "it needs all S tokens, rows as in grad"
    )
    assert found.x_off < TOLERANCE, (
        f"the gradient of x is off by {found.x_off:.2g}: "
        "sum over the ranks, then keep your own tokens"
    )
    part_bytes = BATCH * TOKENS * WIDTH * 8 // p
    assert found.kept_bytes <= part_bytes, (
        f"{found.kept_bytes} bytes are kept for backward, this rank's part of x has {part_bytes}: "
        "save the part alone"
    )
    assert found.gathers == 1, f"backward starts {found.gathers} all-gathers, one for x is enough"


# ---- 10.3

Merge = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def _attend(scores: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over one block of keys: out [heads, S, D] and lse [heads, S]."""
    lse = scores.logsumexp(-1)
    return (scores - lse[..., None]).exp() @ v, lse


def merge(my_merge: Merge) -> None:
    """The learner's merge of attention over two blocks of keys.

    Args:
        my_merge: `my_merge(out_a, lse_a, out_b, lse_b)` -> out and lse of both blocks together.
    """
    draw = torch.Generator().manual_seed(5)
    scores = torch.randn(2, 6, 10, generator=draw, dtype=torch.float64)
    v = torch.randn(2, 10, 4, generator=draw, dtype=torch.float64)
    for shift, keys in ((0.0, 5), (0.0, 2), (3.0, 8)):
        shifted = torch.cat((scores[..., :keys], scores[..., keys:] + shift), -1)
        block_a = _attend(shifted[..., :keys], v[:, :keys])
        block_b = _attend(shifted[..., keys:], v[:, keys:])
        _check_merged(my_merge, block_a, block_b, _attend(shifted, v))
    _check_extremes(my_merge, block_a, block_b)


def _check_merged(
    my_merge: Merge,
    block_a: tuple[Tensor, Tensor],
    block_b: tuple[Tensor, Tensor],
    expected: tuple[Tensor, Tensor],
) -> None:
    out_a, lse_a = block_a
    out_b, lse_b = block_b
    true_out, true_lse = expected
    out, lse = _two(my_merge(out_a, lse_a, out_b, lse_b))
    assert out.shape == true_out.shape, (
        f"out is {list(out.shape)}, should be {list(true_out.shape)}: lse has no dim for D, add one"
    )
    assert not torch.allclose(out, (out_a + out_b) / 2), (
        "that is the plain mean: a block with larger scores counts for more"
    )
    assert not torch.allclose(out, out_a + out_b), (
        "that is the sum: the weights of the two blocks add up to 1"
    )
    assert not torch.allclose(lse, lse_a + lse_b), (
        "lse is the logarithm of a sum of exponentials; you add the logarithms"
    )
    off = _largest_error(out, true_out)
    assert off < TOLERANCE, (
        f"out is off by {off:.2g}: its weights are exp(lse of the block) divided by their sum"
    )
    assert torch.allclose(lse, true_lse), (
        "out is right, lse is not: the next block needs the denominator of both"
    )


def _check_extremes(
    my_merge: Merge, block_a: tuple[Tensor, Tensor], block_b: tuple[Tensor, Tensor]
) -> None:
    """Large scores, and a block without a key."""
    out_a, lse_a = block_a
    out_b, lse_b = block_b
    out, lse = _two(my_merge(out_a, lse_a + 5000, out_b, lse_b + 5000))
    assert torch.isfinite(out).all() and torch.isfinite(lse).all(), (
        "with scores of 5000 it gives nan or inf: exp(5000) overflows; "
        "subtract first, as torch.logaddexp does"
    )
    no_lse = torch.full_like(lse_b, -math.inf)
    out, lse = _two(my_merge(out_a, lse_a, torch.zeros_like(out_b), no_lse))
    assert torch.allclose(out, out_a) and torch.allclose(lse, lse_a), (
        "a block without any key (lse = -inf) must change nothing"
    )


def _two(pair: Any) -> tuple[Tensor, Tensor]:
    pair = due(pair)
    assert isinstance(pair, tuple) and len(pair) == 2, "return two tensors: out, lse"
    return due(*pair)


# ---- 10.4


def chunks(my_chunks: Callable[[int, int], Any]) -> None:
    """The learner's choice of chunks, which gives every rank the same causal work.

    Args:
        my_chunks: `my_chunks(rank, p)`: which of the 2p chunks a rank holds.
    """
    for p in (2, 4, 8):
        held = [list(map(int, due(my_chunks(rank, p)))) for rank in range(p)]
        _check_chunks(held, p)


def _check_chunks(held: list[list[int]], p: int) -> None:
    case = f"p={p}: {held}: "
    every = sorted(itertools.chain.from_iterable(held))
    assert every == list(range(2 * p)), (
        case + f"each of the chunks 0 to {2 * p - 1} belongs to exactly one rank"
    )
    assert all(len(mine) == 2 for mine in held), (
        case + "every rank holds two chunks, or tokens are shared unevenly"
    )
    # chunks of keys that the queries of each rank see: all before a chunk, and half of itself
    work = [sum(mine) + 0.5 * len(mine) for mine in held]
    listed = ", ".join(f"{seen:g}" for seen in work)
    assert max(work) == min(work), case + (
        f"the ranks see {listed} chunks of keys; chunk c sees c + 1/2: which two add up?"
    )


# ---- 10.5

GPUS = 64
PER_NODE = 8
SEQUENCES = 8
ROOM_BYTES = 60e9
LOST_SHARE = 0.2
# bytes per second each way and GPU; sources in lesson 08
NVLINK = 450e9
INFINIBAND = 50e9
H100_FLOPS_PER_S = 989e12  # dense BF16, NVIDIA's H100 datasheet; 40 % of it is reached
LONG = gpt_shape("gpt_7b", context_length=131072)


def _link_speed(ranks: int) -> float:
    """Bytes per second between ranks of a group that spans `ranks` neighbouring GPUs."""
    return NVLINK if ranks <= PER_NODE else INFINIBAND


def costs(shape: GridShape) -> dict[str, float]:
    """What a grid costs with sequence parallelism over tp and a ring over cp.

        act       = S/cp * H * 2 bytes             what one tp group holds between two layers
        tp bytes  = L * 10 * (tp-1)/tp * act       of one GPU for a sequence
        cp bytes  = L * (cp-1) * 8 * act/tp        K and V in forward (2), again in backward (2),
                                                   and their float32 gradients (4)

    Weights, gradients and optimizer take 16 bytes for each parameter, divided by tp. One sequence
    is under way at a time, and nothing overlaps.

    Returns:
        GB on a GPU (`weights_gb`, `activations_gb`) and seconds of a step (`tp_s`, `cp_s`,
        `computing_s`).

    Raises:
        ValueError: The model does not fit the grid.
    """
    kept = model_activations(LONG, shape, batch=1, sequence_parallel=True)
    sequences = SEQUENCES / shape.dp
    act = LONG.context_length / shape.cp * LONG.hidden_size * 2
    tp_bytes = LONG.num_layers * 10 * (shape.tp - 1) / shape.tp * act * sequences
    cp_bytes = LONG.num_layers * (shape.cp - 1) * 2 * act / shape.tp * (1 + 1 + 2) * sequences
    flops = training_flops_per_sample(LONG) * SEQUENCES
    return {
        "weights_gb": 16 * LONG.num_parameters / shape.tp / 1e9,
        "activations_gb": sum(kept.values()) / 1e9,
        "tp_s": tp_bytes / _link_speed(shape.tp),
        "cp_s": cp_bytes / _link_speed(shape.tp * shape.cp),
        "computing_s": flops / GPUS / (0.4 * H100_FLOPS_PER_S),
    }


def design(shape: GridShape) -> None:
    """The learner's grid for sequences of 131072 tokens: it fits, and tp and cp take little time.

    Args:
        shape: Of 64 GPUs.
    """
    shape = due(shape)
    assert isinstance(shape, GridShape), f"{shape!r} is not a GridShape"
    assert shape.world_size == GPUS, f"dp*pp*cp*tp = {shape.world_size}, and there are {GPUS} GPUs"
    assert shape.pp == 1 and SEQUENCES % shape.dp == 0, (
        f"pp is 1 here, and dp divides {SEQUENCES} sequences"
    )
    try:
        found = costs(shape)
    except ValueError as error:
        raise AssertionError(str(error)) from None

    held_bytes = (found["weights_gb"] + found["activations_gb"]) * 1e9
    larger = "weights" if found["weights_gb"] > found["activations_gb"] else "activations"
    assert held_bytes <= ROOM_BYTES, (
        f"{si(held_bytes, 'B')} on each GPU, {si(ROOM_BYTES, 'B')} are allowed; "
        f"most are {larger}: which axis cuts those?"
    )
    lost_s = found["tp_s"] + found["cp_s"]
    computing_s = found["computing_s"]
    slower = "tp" if found["tp_s"] > found["cp_s"] else "cp"
    assert lost_s <= LOST_SHARE * computing_s, (
        f"{lost_s:.1f} s on the links beside {computing_s:.1f} s of computing, "
        f"above {LOST_SHARE:.0%}; most of it is {slower}"
    )
