"""Checks of lesson 08: right answers pass, plausible wrong ones get the hint meant for them."""

from dataclasses import replace

import pytest

from labcode.perf.traffic import across_nodes, step_traffic
from labcode.recipes import gpt_shape
from labcode.teach.exercises import l08
from labcode.topology import GridShape

# ---- 8.1


def my_rank(shape, tp, cp, dp, pp):
    return tp + shape.tp * (cp + shape.cp * (dp + shape.dp * pp))


RANKS = {  # answer: part of the hint, None for a right answer
    "right": (my_rank, None),
    "the library's": (
        lambda shape, tp, cp, dp, pp: shape.rank(tp=tp, cp=cp, dp=dp, pp=pp),
        None,
    ),
    "dp and pp exchanged": (
        lambda shape, tp, cp, dp, pp: tp + shape.tp * (cp + shape.cp * (pp + shape.pp * dp)),
        "one step along dp lands on rank 16",
    ),
    "sizes forgotten": (lambda shape, tp, cp, dp, pp: tp + cp + dp + pp, "one step along cp"),
    "from 1": (
        lambda shape, tp, cp, dp, pp: 1 + my_rank(shape, tp, cp, dp, pp),
        "all coordinates 0 is rank 0",
    ),
}


@pytest.mark.parametrize("answer", RANKS)
def test_rank_of(judged, answer):
    fn, hint = RANKS[answer]
    assert judged(lambda: l08.rank_of(fn), hint)


# ---- 8.2


def neighbours(shape, axis):
    """Right only where the axis is the fastest."""
    size = shape.size(axis)
    return [list(range(i, i + size)) for i in range(0, shape.world_size, size)]


GROUPS = {
    "right": (lambda shape, axis: shape.groups(axis), None),
    "in another order": (lambda shape, axis: reversed(shape.groups(axis)), None),
    "neighbours": (neighbours, "agree in every coordinate but"),
    "everybody": (lambda shape, axis: [range(shape.world_size)], "the size of the axis"),
    "the first alone": (lambda shape, axis: shape.groups(axis)[:1], "exactly one group"),
    "descending": (
        lambda shape, axis: [group[::-1] for group in shape.groups(axis)],
        "ascend",
    ),
}


@pytest.mark.parametrize("answer", GROUPS)
def test_groups_of(judged, answer):
    fn, hint = GROUPS[answer]
    assert judged(lambda: l08.groups_of(fn), hint)


# ---- 8.3


def best(model, shape, ranks_per_node, global_batch):
    def crossing(order):
        ordered = replace(shape, order=order)
        traffic = step_traffic(model, ordered, global_batch=global_batch)
        return sum(across_nodes(sent, ranks_per_node) for sent in traffic.values())

    return min(l08.ORDERS, key=crossing)


BEST = {
    "right": (best, None),
    "one for all": (lambda *_: "pp-dp-cp-tp", "compare all 24"),
    "another batch": (
        lambda model, shape, ranks_per_node, batch: best(model, shape, ranks_per_node, 8),
        "compare all 24",
    ),
    "an axis forgotten": (lambda *_: "tp-dp-pp", "names all four axes"),
    "a tuple": (lambda *_: ("tp", "cp", "dp", "pp"), "names all four axes"),
}


@pytest.mark.parametrize("answer", BEST)
def test_best_order(judged, answer):
    fn, hint = BEST[answer]
    assert judged(lambda: l08.best_order(fn, gpt_shape("gpt_7b")), hint)


# ---- 8.4

DESIGNS = {
    "pipeline and tensor": (GridShape(dp=4, pp=8, tp=2), None),
    "pipeline alone": (GridShape(dp=8, pp=8), None),
    "too few ranks": (GridShape(dp=4, tp=8), "there are 64 GPUs"),
    "does not fit": (GridShape(dp=64), "are allowed"),
    "a tuple": ((8, 8), "is not a GridShape"),
    "stages of unequal depth": (GridShape(dp=4, pp=16), "not divisible by pp=16"),
    "no pipeline": (GridShape(dp=8, tp=8), "which axis sends most of that"),
    "tp across nodes": (GridShape(tp=8, dp=8, order="dp-pp-tp-cp"), "over which links"),
}


@pytest.mark.parametrize("answer", DESIGNS)
def test_design(judged, answer):
    shape, hint = DESIGNS[answer]
    assert judged(lambda: l08.design(shape), hint)
