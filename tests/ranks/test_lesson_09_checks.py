"""The checks of lesson 09 pass right answers, and give plausible wrong ones their own hint."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from labcode.comm.collectives import copy_to, reduce_from
from labcode.pool.ranks import RankError
from labcode.teach.exercises import l09


def function(forward, backward, gradients=lambda grad: (grad, None)):
    """An autograd Function of two operations on (tensor, group)."""

    def run_forward(ctx, x, group):
        ctx.group = group
        return forward(x, group)

    def run_backward(ctx, grad):
        return gradients(backward(grad, ctx.group))

    names = {"forward": staticmethod(run_forward), "backward": staticmethod(run_backward)}
    return type("Learners", (torch.autograd.Function,), names)


def same(x, group):
    return x.view_as(x)


def total(x, group):
    x = x.clone()
    dist.all_reduce(x, group=group)
    return x


def total_in_place(x, group):
    dist.all_reduce(x, group=group)
    return x


def mean(x, group):
    return total(x, group) / group.size()


PAIRS = {  # answer: f, g, part of the hint, None for a right answer
    "right": (function(same, total), function(total, same), None),
    "f hands on": (function(same, same), function(total, same), "own part"),
    "f sums forward": (function(total, total), function(total, same), "forward is the identity"),
    "f in place": (function(same, total_in_place), function(total, same), "handed"),
    "f averages": (function(same, mean), function(total, same), "backward gives"),
    "f without None": (
        function(same, total, lambda grad: grad),
        function(total, same),
        "incorrect number of gradients",
    ),
    "g does nothing": (function(same, total), function(same, same), "forward has to sum"),
    "g sums twice": (function(same, total), function(total, total), "2 times too long"),
    "g in place": (function(same, total), function(total_in_place, same), "wrote into its input"),
    "no gradient": (
        function(same, total),
        function(total, same, lambda grad: (None, None)),
        "no gradient",
    ),
}


def own_loss(logits, targets, first, group, peak=total, masked=True, sums=total, log=True):
    highest = logits.amax(-1)
    if peak is total:
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
    if peak is None:
        highest = torch.zeros_like(highest)
    shifted = logits - highest[:, None]
    column = targets - first
    elsewhere = (column < 0) | (column >= logits.shape[-1])
    target = shifted.gather(-1, column.clamp(0, logits.shape[-1] - 1)[:, None])[:, 0]
    if masked:
        target = target.masked_fill(elsewhere, 0)
    both = sums(torch.stack((shifted.exp().sum(-1), target)), group)
    return both[0].log() - both[1]


def gathered(logits, targets, first, group):
    longest = torch.full(
        (len(targets), -(-l09.VOCAB // group.size())), -torch.inf, dtype=logits.dtype
    )
    longest[:, : logits.shape[-1]] = logits
    parts = [torch.empty_like(longest) for _ in range(group.size())]
    dist.all_gather(parts, longest, group=group)
    whole = torch.cat([part[:, part.isfinite().any(0)] for part in parts], -1)
    return F.cross_entropy(whole, targets, reduction="none")


def in_place(logits, targets, first, group):
    loss = own_loss(logits, targets, first, group)
    logits.exp_()
    return loss


LOSSES = {
    "right": (own_loss, None),
    "mean": (lambda *args: own_loss(*args).mean(), "one loss for each"),
    "no maximum": (lambda *args: own_loss(*args, peak=None), "subtract the maximum"),
    "own maximum": (lambda *args: own_loss(*args, peak=same), "agree on one"),
    "nothing summed": (lambda *args: own_loss(*args, sums=same), "who has the logit of the target"),
    "not masked": (lambda *args: own_loss(*args, masked=False), "who has the logit of the target"),
    "gathered": (gathered, "three are enough"),
    "in place": (in_place, "changed in place"),
}


def sent(
    config,
    batch,
    value_bytes,
    extra=4,
    number_of_act=lambda config: 4 * config.num_layers + 2,
    loss=3,
    loss_bytes=4,
):
    per_token = batch * config.context_length
    act = per_token * config.hidden_size * value_bytes
    return 4 * config.num_layers + extra, number_of_act(
        config
    ) * act + loss * per_token * loss_bytes


TRAFFIC = {
    "right": (sent, None),
    "layers only": (
        lambda *args: sent(
            *args, extra=0, number_of_act=lambda config: 4 * config.num_layers, loss=0
        ),
        "the layers alone",
    ),
    "loss forgotten": (lambda *args: sent(*args, extra=2, loss=0), "all-reduces, the model makes"),
    "loss like a layer": (
        lambda *args: sent(*args, number_of_act=lambda config: 4 * config.num_layers + 4, loss=0),
        "three numbers per token",
    ),
    "loss in bfloat16": (
        lambda config, batch, size: sent(config, batch, size, loss_bytes=size),
        "float32 whatever",
    ),
    "one number": (lambda *args: sent(*args)[1], "how many all-reduces, their bytes"),
    "only the target": (lambda *args: sent(*args, loss=1), "the model sends"),
}


def llama(x, gate, up, down, group, enter=copy_to, leave=reduce_from, dim=1, twice=False):
    rank, p = group.rank(), group.size()
    entered = enter(x, group)
    again = enter(x, group) if twice else entered
    gate, up, down = gate.chunk(p)[rank], up.chunk(p)[rank], down.chunk(p, dim)[rank]
    if dim == 0:
        down = torch.cat([down] * p)[:, : gate.shape[0]]
    return leave((F.silu(entered @ gate.T) * (again @ up.T)) @ down.T, group)


SWIGLUS = {
    "right": (llama, None),
    "f forgotten": (lambda *args: llama(*args, enter=same), "gradient of x is not"),
    "f twice": (lambda *args: llama(*args, twice=True), "where does x enter"),
    "g forgotten": (lambda *args: llama(*args, leave=same), "nothing travels forward"),
    "rows of down": (lambda *args: llama(*args, dim=0), "fit together"),
    "whole everywhere": (
        lambda x, gate, up, down, group: (F.silu(x @ gate.T) * (x @ up.T)) @ down.T,
        "nothing travels forward",
    ),
}


@pytest.mark.parametrize("answer", PAIRS)
def test_f_and_g(judged, ranks2, answer):
    f, g, hint = PAIRS[answer]
    assert judged(lambda: l09.copy_and_reduce(f, g, ranks2), hint, also=[RankError])


@pytest.mark.parametrize("answer", LOSSES)
def test_loss_over_the_vocabulary(judged, ranks2, answer):
    fn, hint = LOSSES[answer]
    assert judged(lambda: l09.vocabulary_loss(fn, ranks2), hint, also=[RankError])


@pytest.mark.parametrize("answer", TRAFFIC)
def test_traffic(judged, ranks2, answer):
    fn, hint = TRAFFIC[answer]
    assert judged(lambda: l09.traffic(fn, ranks2), hint, also=[RankError])


@pytest.mark.parametrize("answer", SWIGLUS)
def test_swiglu(judged, ranks2, answer):
    fn, hint = SWIGLUS[answer]
    assert judged(lambda: l09.swiglu(fn, ranks2), hint, also=[RankError])
