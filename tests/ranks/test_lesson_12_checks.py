"""The checks of lesson 12 pass right answers, and give plausible wrong ones their own hint."""

import math

import pytest

from labcode.perf.pipeline import StageTimes, simulate
from labcode.pool.ranks import RankError
from labcode.schedules import NAMES, Action, schedule, waits_for
from labcode.teach.exercises import l12
from labcode.teach.labs import l12_paced_pipeline

# ---- 12.1

ENOUGH = {
    "right": (lambda p, share: math.ceil((p - 1) * (1 - share) / share), None),
    "right, as a float": (lambda p, share: float(math.ceil((p - 1) * (1 - share) / share)), None),
    "share of the work": (lambda p, share: math.ceil((p - 1) / share), "share of the whole time"),
    "not rounded": (lambda p, share: (p - 1) * (1 - share) / share, "rounded up"),
    "rounded down": (
        lambda p, share: max(1, math.floor((p - 1) * (1 - share) / share)),
        "the ranks wait",
    ),
    "p in place of p - 1": (
        lambda p, share: math.ceil(p * (1 - share) / share),
        "fewer are as well",
    ),
    "none": (lambda p, share: 0, "at least one"),
}


@pytest.mark.parametrize("answer", ENOUGH)
def test_how_many_micro_batches_are_enough(judged, answer):
    enough, hint = ENOUGH[answer]
    assert judged(lambda: l12.enough(enough), hint, also=[RankError])


# ---- 12.2


def order(
    rank, p, m, warmup=lambda rank, p: p - 1 - rank, backwards=lambda m: range(m), swapped=False
):
    """1F1B, or what is left of it with another warm-up, other backwards, or backward first."""
    first = min(warmup(rank, p), m)
    forward = [Action("F", rank, i) for i in range(m)]
    backward = [Action("B", rank, i) for i in backwards(m)]
    found = forward[:first]
    for pair in zip(forward[first:], backward):
        found += reversed(pair) if swapped else pair
    return found + backward[m - first :]


ORDERS = {
    "right": (order, None),
    "gpipe": (lambda rank, p, m: schedule("gpipe", p, m)[rank], "micro-batches at once"),
    "one warm-up too many": (
        lambda *args: order(*args, warmup=lambda rank, p: p - rank),
        "micro-batches at once",
    ),
    "no warm-up": (
        lambda *args: order(*args, warmup=lambda rank, p: 0),
        "how many forwards come before",
    ),
    "warm-up of the other end": (
        lambda *args: order(*args, warmup=lambda rank, p: rank),
        "cannot start",
    ),
    "backward first": (lambda *args: order(*args, swapped=True), "cannot start"),
    "last backward forgotten": (lambda *args: order(*args)[:-1], "each once"),
    "cool-down forgotten": (
        lambda rank, p, m: order(rank, p, m)[: 2 * m - (p - 1 - rank)],
        "each once",
    ),
    "backwards reversed": (
        lambda *args: order(*args, backwards=lambda m: reversed(range(m))),
        "cannot start",
    ),
    "text": (lambda *args: [str(action) for action in order(*args)], "give a list of Action"),
    "all ranks at once": (lambda rank, p, m: schedule("1f1b", p, m), "give a list of Action"),
    "always stage 0": (
        lambda rank, p, m: [a._replace(stage=0) for a in order(rank, p, m)],
        "each once",
    ),
}


@pytest.mark.parametrize("answer", ORDERS)
def test_the_order_of_one_rank(judged, ranks4, answer):
    fn, hint = ORDERS[answer]
    assert judged(lambda: l12.one_f_one_b(fn, ranks4), hint, also=[RankError])


# ---- 12.3

HALVES = {
    "right": (
        lambda grad, weight: grad @ weight,
        lambda grad, x: grad.flatten(0, -2).T @ x.flatten(0, -2),
        None,
    ),
    "weight transposed": (
        lambda grad, weight: grad @ weight,
        lambda grad, x: x.flatten(0, -2).T @ grad.flatten(0, -2),
        "is the transpose",
    ),
    "one for each sample": (
        lambda grad, weight: grad @ weight,
        lambda grad, x: grad.mT @ x,
        "a sum over samples",
    ),
    "a mean": (
        lambda grad, weight: grad @ weight,
        lambda grad, x: (grad.mT @ x).mean(0),
        "the values are 5",
    ),
    "input of ones": (
        lambda grad, weight: 0 * grad @ weight,
        lambda grad, x: grad,
        "input_half: the shape is right",
    ),
    "nothing done": (
        lambda grad, weight: grad,
        lambda grad, x: grad,
        "input_half: [2, 5, 3], expected [2, 5, 7]",
    ),
}


@pytest.mark.parametrize("answer", HALVES)
def test_two_halves_of_a_backward(judged, answer):
    input_half, weight_half, hint = HALVES[answer]
    assert judged(lambda: l12.halves(input_half, weight_half), hint, also=[RankError])


# ---- 12.4

LAYERS = {
    "right": ((4, 4, 4, 2), None),
    "a list": ([4, 4, 4, 2], None),
    "as evenly as possible": ((4, 4, 3, 3), "sets the pace"),
    "the head at the wrong end": ((2, 4, 4, 4), "sets the pace"),
    "too few": ((4, 4, 4, 1), "add up to 14"),
    "a stage without a layer": ((5, 5, 4, 0), "at least 1"),
    "three stages": ((5, 5, 4), "give 4 numbers"),
}


@pytest.mark.parametrize("answer", LAYERS)
def test_layers_of_each_stage(judged, answer):
    sizes, hint = LAYERS[answer]
    assert judged(lambda: l12.layers(sizes), hint, also=[RankError])


def test_what_is_missing_is_not_done_yet():
    for test in (lambda: l12.enough(lambda p, share: ...), lambda: l12.layers(...)):
        with pytest.raises(NotImplementedError):
            test()


def test_a_forgotten_return_is_named():
    """It once counted as not done, and the learner looked for the fault elsewhere."""
    with pytest.raises(AssertionError, match="it returned None"):
        l12.enough(lambda p, share: None)


# ---- the emulated stages


@pytest.mark.parametrize("name", NAMES)
def test_a_paced_run_keeps_the_order_the_pace_the_memory_and_the_gradients(ranks4, name):
    v = 2 if name == "interleaved" else 1
    actions, stage_s = schedule(name, 4 * v, 4, 4), StageTimes(2e-3, 2e-3, 2e-3)
    played = ranks4.run(l12_paced_pipeline.run_schedule, actions, 4 * v, 4, stage_s, repeats=3)
    simulated, measured = simulate(actions, stage_s), l12_paced_pipeline.timeline(played)
    assert l12_paced_pipeline.difference(played, 4 * v, 4) < 1e-12
    for rank, order in actions.items():
        rows = [row for row in measured.rows if row.rank == rank]
        assert [row.action for row in rows] == order
        assert all(row.stop_s - row.start_s >= stage_s.of(row.action.kind) - 1e-6 for row in rows)
        assert played[rank].peak == simulated.peak_microbatches(rank)
    stops = {row.action: row.stop_s for row in measured.rows}
    for row in measured.rows:  # waiting for an input is no work: it lies before the start
        for need in waits_for(row.action, 4 * v):
            assert row.start_s >= stops[need if need in stops else need._replace(kind="B")]
    assert measured.total_s >= simulated.total_s - 1e-6
    assert sum(one.sent[0] for one in played) == 2 * (4 * v - 1) * 4
    assert (
        sum(one.sent[1] for one in played)
        == 2 * (4 * v - 1) * 4 * l12_paced_pipeline.BATCH * l12_paced_pipeline.WIDTH * 8
    )
