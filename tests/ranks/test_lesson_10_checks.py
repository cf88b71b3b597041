"""The checks of lesson 10 pass right answers, and give plausible wrong ones their own hint."""

import pytest
import torch
import torch.nn.functional as F

from labcode.comm.collectives import start_all_gather, start_reduce_scatter
from labcode.teach.exercises import l10
from labcode.topology import GridShape


def gain(before, after):
    return after[1] / before[1]


def share(ratio, t):
    return (ratio - 1 / t) / (1 - 1 / t)


PUBLISHED = {  # answer: functions, part of the hint (None: right)
    "right": (lambda a, b: gain(a, b) * a[0] / b[0], share, None),
    "the speed-up": (gain, share, "is the speed-up"),
    "against one GPU": (lambda a, b: gain(a, b) / b[0], share, "with 4 GPUs, not with one"),
    "upside down": (lambda a, b: b[0] / a[0] / gain(a, b), share, "upside down"),
    "the ratio itself": (
        lambda a, b: gain(a, b) * a[0] / b[0],
        lambda ratio, t: ratio,
        "cut entirely",
    ),
    "what is above a fair part": (
        lambda a, b: gain(a, b) * a[0] / b[0],
        lambda ratio, t: ratio - 1 / t,
        "the share is 1",
    ),
}


def again(part=True, scatter=True, whole_weight_gradient=True, gathers=1):
    """A Function with one thing done differently."""

    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, group):
            whole = start_all_gather(x, group, 1)()
            ctx.save_for_backward(x if part else whole, weight)
            ctx.group = group
            return F.linear(whole, weight)

        @staticmethod
        def backward(ctx, grad):
            x, weight = ctx.saved_tensors
            whole, tokens = x, grad.shape[1] // ctx.group.size()
            mine = slice(ctx.group.rank() * tokens, (ctx.group.rank() + 1) * tokens)
            for _ in range(gathers if part else 0):
                whole = start_all_gather(x, ctx.group, 1)()
            grad_x = grad @ weight
            grad_x = start_reduce_scatter(grad_x, ctx.group, 1)() if scatter else grad_x[:, mine]
            seen = slice(None) if whole_weight_gradient else mine
            return grad_x, grad[:, seen].flatten(0, 1).T @ whole[:, seen].flatten(0, 1), None

    return Again


AGAIN = {
    "right": ({}, None),
    "keeps the whole": ({"part": False}, "save the part"),
    "no sum": ({"scatter": False}, "the other ranks used these tokens"),
    "weight from own tokens": ({"whole_weight_gradient": False}, "needs all S tokens"),
    "gathers twice": ({"gathers": 2}, "one for x is enough"),
}


def merged(out_a, lse_a, out_b, lse_b):
    lse = torch.logaddexp(lse_a, lse_b)
    return out_a * (lse_a - lse).exp()[..., None] + out_b * (lse_b - lse).exp()[..., None], lse


def naive(out_a, lse_a, out_b, lse_b):
    a, b = lse_a.exp()[..., None], lse_b.exp()[..., None]
    return (out_a * a + out_b * b) / (a + b), (a + b).log().squeeze(-1)


MERGES = {
    "right": (merged, None),
    "mean": (lambda a, x, b, y: ((a + b) / 2, torch.logaddexp(x, y)), "plain mean"),
    "sum": (lambda a, x, b, y: (a + b, torch.logaddexp(x, y)), "add up to 1"),
    "logs added": (lambda a, x, b, y: (merged(a, x, b, y)[0], x + y), "you add the logarithms"),
    "weighted by lse": (
        lambda a, x, b, y: (torch.lerp(a, b, (y / (x + y))[..., None]), torch.logaddexp(x, y)),
        "exp(lse",
    ),
    "larger lse": (
        lambda a, x, b, y: (merged(a, x, b, y)[0], torch.maximum(x, y)),
        "denominator of both",
    ),
    "overflows": (naive, "overflows"),
    "one tensor": (lambda a, x, b, y: merged(a, x, b, y)[0], "two tensors"),
}

CHUNKS = {
    "right": (lambda rank, p: [rank, 2 * p - 1 - rank], None),
    "the other way round": (lambda rank, p: (2 * p - 1 - rank, rank), None),
    "contiguous": (lambda rank, p: [2 * rank, 2 * rank + 1], "which two add up"),
    "striped": (lambda rank, p: [rank, rank + p], "which two add up"),
    "one too far": (lambda rank, p: [rank, 2 * p - rank], "exactly one rank"),
    "one chunk": (lambda rank, p: [rank], "exactly one rank"),
    "uneven": (
        lambda rank, p: [[0, 1, 2], [3]][rank] if p == 2 else [rank, 2 * p - 1 - rank],
        "holds two chunks",
    ),
}

GRIDS = {
    "right": (GridShape(dp=4, cp=2, tp=8), None),
    "no tp": (GridShape(dp=8, cp=8), "weights: which axis"),
    "no cp": (GridShape(dp=8, tp=8), "activations: which axis"),
    "tp over two nodes": (GridShape(dp=4, tp=16), "most of it is tp"),
    "long rings": (GridShape(cp=8, tp=8), "most of it is cp"),
    "too few": (GridShape(cp=2, tp=8), "there are 64 GPUs"),
    "too many copies": (GridShape(dp=16, tp=4), "dp divides 8"),
    "more ranks than heads": (GridShape(tp=64), "num_heads=32"),
}


@pytest.mark.parametrize("answer", PUBLISHED)
def test_the_published_result(judged, answer):
    efficiency, whole_share, hint = PUBLISHED[answer]
    assert judged(lambda: l10.published(efficiency, whole_share), hint)


@pytest.mark.parametrize("answer", AGAIN)
def test_gather_again(judged, ranks4, answer):
    changes, hint = AGAIN[answer]
    assert judged(lambda: l10.gathers_again(again(**changes), ranks4), hint)


@pytest.mark.parametrize("answer", MERGES)
def test_merge(judged, answer):
    fn, hint = MERGES[answer]
    assert judged(lambda: l10.merge(fn), hint)


@pytest.mark.parametrize("answer", CHUNKS)
def test_chunks(judged, answer):
    fn, hint = CHUNKS[answer]
    assert judged(lambda: l10.chunks(fn), hint)


@pytest.mark.parametrize("answer", GRIDS)
def test_design(judged, answer):
    shape, hint = GRIDS[answer]
    assert judged(lambda: l10.design(shape), hint)
