"""Checks of lesson 09, sequence and context parallel. Each assertion's text is a hint."""

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F

from labcode.comm.counting import counted, totals
from labcode.perf.flops import training_flops_per_sample
from labcode.perf.memory import model_activations
from labcode.perf.saved_bytes import saved_bytes
from labcode.recipes import gpt_shape
from labcode.teach.check import due
from labcode.topology import GridShape
from labcode.units import si

# ---- 9.1


def published(efficiency, whole_share) -> None:
    """The learner's `efficiency(before, after)` of (GPUs, samples/s) and `whole_share(ratio, t)`."""
    for before, after in (
        ((4, 93.1), (16, 125.2)),
        ((1, 10.0), (2, 20.0)),
        ((8, 50.0), (24, 120.0)),
    ):
        case, found = f"{before} to {after}: ", due(efficiency(before, after))
        gain, times = after[1] / before[1], after[0] / before[0]
        if _near(found, gain / times):
            continue
        assert not _near(found, gain), (
            case + f"{found:.3g} is the speed-up; how many times as many GPUs did it take?"
        )
        assert not _near(found, gain / after[0]), (
            case + f"the comparison is with {before[0]} GPUs, not with one"
        )
        assert not _near(found, times / gain), case + f"{found:.3g} is upside down"
        raise AssertionError(
            case + f"{found:.4g}: divide the speed-up by how many times as many GPUs there are"
        )
    for t in (2, 4, 8):
        everything, nothing = due(whole_share(1.0, t)), due(whole_share(1 / t, t))
        assert _near(everything, 1), (
            f"what keeps all of its memory on {t} ranks is whole: the share is 1, yours {everything:.3g}"
        )
        assert abs(nothing) < 1e-9, (
            f"what keeps 1/{t} on {t} ranks is cut entirely: the share is 0, yours {nothing:.3g}"
        )
        found = due(whole_share(0.3 + 0.7 / t, t))
        assert _near(found, 0.3), (
            f"whole 0.3, the rest cut by {t}: ratio {0.3 + 0.7 / t:.4g}, and your share is {found:.3g}"
        )


def _near(a, b):
    return math.isclose(a, b, rel_tol=1e-6)


# ---- 9.2

BATCH, TOKENS, WIDTH = 2, 32, 8


def _gathered(rank, again):
    group, p = dist.group.WORLD, dist.get_world_size()
    draw = torch.Generator().manual_seed(3)
    x, weight, grad = (
        torch.randn(*size, generator=draw, dtype=torch.float64)
        for size in ((BATCH, TOKENS, WIDTH),) * 3
    )
    weight, grad = (
        weight[0, : 4 * p].clone(),
        grad[..., :4].repeat(1, 1, p),
    )  # [4p, H]; [B, S, 4p], this rank's 4 columns
    x_whole, w_whole = x.clone().requires_grad_(), weight.clone().requires_grad_()
    F.linear(x_whole, w_whole).backward(grad)
    mine, rows = (slice(rank * n, (rank + 1) * n) for n in (TOKENS // p, 4))
    own, part = x[:, mine].clone().requires_grad_(), weight[rows].clone().requires_grad_()
    with (
        saved_bytes(torch.nn.ParameterList([torch.nn.Parameter(part)])) as saved,
        counted() as forward,
    ):
        y = again.apply(own, part, group)
    kept = saved.total()
    assert y is not None and y.shape == (BATCH, TOKENS, 4), "forward returns [B, S, F/p]"
    with counted() as backward:
        y.backward(grad[..., rows])
    off = [
        (found - true).abs().max().item()
        for found, true in ((own.grad, x_whole.grad[:, mine]), (part.grad, w_whole.grad[rows]))
    ]
    alone = (own.grad - (grad[..., rows] @ weight[rows])[:, mine]).abs().max().item()
    return {
        "kept": kept,
        "whole": x.nbytes,
        "off": off,
        "alone": alone,
        "forward": totals(forward),
        "backward": totals(backward),
    }


def gathers_again(again, ranks) -> None:
    """The learner's Function: `apply(x, weight, group)` keeps its part only and gathers it a second time in backward."""
    found = ranks.run(_gathered, again)[0]
    p = ranks.n
    assert found["alone"] > 1e-9 or p == 1, (
        "the gradient of x is this rank's alone: the other ranks used these tokens as well"
    )
    (off_x, off_weight), backward = found["off"], found["backward"]
    assert off_weight < 1e-9, (
        f"the gradient of the weight is off by {off_weight:.2g}: it needs all S tokens, rows as in grad"
    )
    assert off_x < 1e-9, (
        f"the gradient of x is off by {off_x:.2g}: sum over the ranks, then keep your own tokens"
    )
    assert found["kept"] <= found["whole"] // p, (
        f"{found['kept']} bytes are kept for backward, this rank's part of x has {found['whole'] // p}: save the part alone"
    )
    gathers = backward.get("all_gather", (0, 0))[0]
    assert gathers == 1, f"backward starts {gathers} all-gathers, one for x is enough"


# ---- 9.3


def _attend(scores, v):
    lse = scores.logsumexp(-1)
    return (scores - lse[..., None]).exp() @ v, lse


def merge(my_merge) -> None:
    """The learner's `my_merge(out_a, lse_a, out_b, lse_b)` -> out, lse of both blocks of keys together."""
    draw = torch.Generator().manual_seed(5)
    scores, v = (
        torch.randn(*size, generator=draw, dtype=torch.float64) for size in ((2, 6, 10), (2, 10, 4))
    )
    for shift, keys in ((0.0, 5), (0.0, 2), (3.0, 8)):
        shifted = torch.cat((scores[..., :keys], scores[..., keys:] + shift), -1)
        parts = [
            _attend(shifted[..., part], v[:, part]) for part in (slice(keys), slice(keys, None))
        ]
        out, lse = _two(my_merge(*parts[0], *parts[1]))
        true_out, true_lse = _attend(shifted, v)
        (out_a, lse_a), (out_b, lse_b) = parts
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
        off = (out - true_out).abs().max().item()
        assert off < 1e-9, (
            f"out is off by {off:.2g}: its weights are exp(lse of the block) divided by their sum"
        )
        assert torch.allclose(lse, true_lse), (
            "out is right, lse is not: the next block needs the denominator of both"
        )
    out, lse = _two(my_merge(out_a, lse_a + 5000, out_b, lse_b + 5000))
    assert torch.isfinite(out).all() and torch.isfinite(lse).all(), (
        "with scores of 5000 it gives nan or inf: exp(5000) overflows; subtract first, as torch.logaddexp does"
    )
    out, lse = _two(
        my_merge(out_a, lse_a, torch.zeros_like(out_b), torch.full_like(lse_b, -math.inf))
    )
    assert torch.allclose(out, out_a) and torch.allclose(lse, lse_a), (
        "a block without any key (lse = -inf) must change nothing"
    )


def _two(pair):
    pair = due(pair)
    assert isinstance(pair, tuple) and len(pair) == 2, "return two tensors: out, lse"
    return due(*pair)


# ---- 9.4


def chunks(my_chunks) -> None:
    """The learner's `my_chunks(rank, p)`: which of 2p chunks a rank holds, the same causal work for all."""
    for p in (2, 4, 8):
        held = [[int(chunk) for chunk in due(my_chunks(rank, p))] for rank in range(p)]
        case, every = f"p={p}: {held}: ", sorted(chunk for mine in held for chunk in mine)
        assert every == list(range(2 * p)), (
            case + f"each of the chunks 0 to {2 * p - 1} belongs to exactly one rank"
        )
        assert all(len(mine) == 2 for mine in held), (
            case + "every rank holds two chunks, or tokens are shared unevenly"
        )
        work = [
            sum(chunk + 0.5 for chunk in mine) for mine in held
        ]  # chunks of keys that its queries see
        assert max(work) == min(work), case + (
            f"the ranks see {', '.join(f'{w:g}' for w in work)} chunks of keys; chunk c sees c + 1/2: which two add up?"
        )


# ---- 9.5

GPUS, PER_NODE, SEQUENCES, ROOM_BYTES, LOST_SHARE = 64, 8, 8, 60e9, 0.2
NVLINK, INFINIBAND = 450e9, 50e9  # bytes per second each way and GPU; sources in lesson 07
LONG = gpt_shape("gpt_7b", context_length=131072)


def costs(shape: GridShape) -> dict[str, float]:
    """What a grid costs with sequence parallelism over tp and a ring over cp: GB on a GPU, seconds of a step.

    Weights, gradients and optimizer are 16 bytes a parameter over tp; one sequence is under way at a time; nothing overlaps.

    Raises:
        ValueError: The model does not fit the grid.
    """
    kept = sum(model_activations(LONG, shape, batch=1, sequence_parallel=True).values())
    sequences = SEQUENCES / shape.dp
    act = (
        LONG.context_length / shape.cp * LONG.hidden_size * 2
    )  # what one tp group holds between two layers
    tp_bytes = LONG.num_layers * 10 * (shape.tp - 1) / shape.tp * act * sequences
    cp_bytes = (
        LONG.num_layers * (shape.cp - 1) * 2 * act / shape.tp * (1 + 1 + 2) * sequences
    )  # K and V twice, then wide sums
    inside = shape.tp <= PER_NODE
    return {
        "weights_gb": 16 * LONG.num_parameters / shape.tp / 1e9,
        "activations_gb": kept / 1e9,
        "tp_s": tp_bytes / (NVLINK if inside else INFINIBAND),
        "cp_s": cp_bytes / (NVLINK if shape.tp * shape.cp <= PER_NODE else INFINIBAND),
        "computing_s": training_flops_per_sample(LONG) * SEQUENCES / GPUS / (0.4 * 989e12),
    }


def design(shape) -> None:
    """The learner's grid for sequences of 131072 tokens: it fits, and little time goes to tp and cp."""
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
    size, lost = (
        (found["weights_gb"] + found["activations_gb"]) * 1e9,
        found["tp_s"] + found["cp_s"],
    )
    larger = "weights" if found["weights_gb"] > found["activations_gb"] else "activations"
    assert size <= ROOM_BYTES, (
        f"{si(size, 'B')} on each GPU, {si(ROOM_BYTES, 'B')} are allowed; most are {larger}: which axis cuts those?"
    )
    axis, computing_s = "tp" if found["tp_s"] > found["cp_s"] else "cp", found["computing_s"]
    assert lost <= LOST_SHARE * computing_s, (
        f"{lost:.1f} s on the links beside {computing_s:.1f} s of computing, above {LOST_SHARE:.0%}; most of it is {axis}"
    )
