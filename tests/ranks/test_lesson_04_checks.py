"""The checks of lesson 04 pass right answers, and give plausible wrong ones their own hint."""

import contextlib

import pytest
import torch
import torch.distributed as dist

from labcode.teach.exercises import l04


def average(model, weight, travel=True):
    for param in model.parameters():
        param.grad *= weight
        if travel:
            dist.all_reduce(param.grad)


AVERAGES = {  # answer: part of the hint, None for a right answer
    "right": (lambda model, mine, total: average(model, mine / total), None),
    "mean of means": (
        lambda model, mine, total: average(model, 1 / dist.get_world_size()),
        "mean of the means",
    ),
    "sum": (lambda model, mine, total: average(model, 1), "plain sum"),
    "not divided by the total": (lambda model, mine, total: average(model, mine), "times as long"),
    "nothing sent": (
        lambda model, mine, total: average(model, mine / total, travel=False),
        "the sum has to travel",
    ),
    "nothing done": (lambda model, mine, total: None, "did anything travel"),
}


def filled(sizes, limit, order=reversed, full=lambda filled, size, limit: filled + size > limit):
    buckets, filled = [], 0
    for index in order(range(len(sizes))):
        if not buckets or full(filled, sizes[index], limit):
            buckets.append([])
            filled = 0
        buckets[-1].append(index)
        filled += sizes[index]
    return buckets


ASSIGNMENTS = {
    "right": (filled, None),
    "first parameter first": (
        lambda sizes, limit: filled(sizes, limit, order=iter),
        "backward's order",
    ),
    "exactly full is too full": (
        lambda sizes, limit: filled(
            sizes, limit, full=lambda filled, size, limit: filled + size >= limit
        ),
        "all-reduces",
    ),
    "looks too late": (
        lambda sizes, limit: filled(sizes, limit, full=lambda filled, size, limit: filled > limit),
        "more than",
    ),
    "one each": (
        lambda sizes, limit: [[index] for index in reversed(range(len(sizes)))],
        "all-reduces",
    ),
    "empty bucket": (lambda sizes, limit: [[], *filled(sizes, limit)], "empty bucket"),
    "sizes, not indices": (
        lambda sizes, limit: [[sizes[i] for i in b] for b in filled(sizes, limit)],
        "every index once",
    ),
}


def unless(quiet, model):
    return model.no_sync() if quiet else contextlib.nullcontext()


CONTEXTS = {
    "right": (lambda model, number, accumulation: unless(number < accumulation, model), None),
    "always sends": (lambda model, number, accumulation: unless(False, model), "one is enough"),
    "never sends": (lambda model, number, accumulation: unless(True, model), "was ever sent"),
    "the first sends": (
        lambda model, number, accumulation: unless(number > 1, model),
        "the last one",
    ),
    "counts from 0": (
        lambda model, number, accumulation: unless(number < accumulation - 1, model),
        "one is enough",
    ),
}


def hook(group, bucket, dtype=torch.bfloat16, divide=True, value=lambda done: done.value()[0]):
    half = (bucket.buffer() / (group.size() if divide else 1)).to(dtype)
    future = dist.all_reduce(half, group=group, async_op=True).get_future()
    return future.then(value) if value else future


HOOKS = {
    "right": (lambda group, bucket: hook(group, bucket), None),
    "sum": (lambda group, bucket: hook(group, bucket, divide=False), "times as long"),
    "full precision": (
        lambda group, bucket: hook(group, bucket, dtype=torch.float32),
        "torch.float32 travelled",
    ),
    "half precision": (
        lambda group, bucket: hook(group, bucket, dtype=torch.float16),
        "torch.float16 travelled",
    ),
    "a list": (lambda group, bucket: hook(group, bucket, value=None), "holds a list"),
    "another name": (lambda group, gradients: hook(group, gradients), "parameters (state, bucket)"),
}


@pytest.mark.parametrize("answer", AVERAGES)
def test_uneven_shares(judged, ranks4, answer):
    fn, hint = AVERAGES[answer]
    assert judged(lambda: l04.average_uneven(fn, ranks4), hint)


@pytest.mark.parametrize("answer", ASSIGNMENTS)
def test_buckets(judged, answer):
    fn, hint = ASSIGNMENTS[answer]
    assert judged(lambda: l04.assign(fn), hint)


@pytest.mark.parametrize("answer", CONTEXTS)
def test_the_last_one_sends(judged, ranks2, answer):
    fn, hint = CONTEXTS[answer]
    assert judged(lambda: l04.last_only(fn, ranks2), hint)


@pytest.mark.parametrize("answer", HOOKS)
def test_half_the_bytes(judged, ranks2, answer):
    fn, hint = HOOKS[answer]
    assert judged(lambda: l04.compress(fn, ranks2), hint)
