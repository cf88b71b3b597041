"""The simulator of pipelines, against formulas of papers and the longest path through its graph."""

import functools
import graphlib
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labcode.perf.pipeline import (
    EQUAL,
    Bar,
    StageTimes,
    Timeline,
    bubble_over_ideal,
    bubble_over_total,
    peak_microbatches,
    simulate,
)
from labcode.schedules import NAMES, Action, schedule, stage_ranks, ticks, waits_for


def fits(name, p, m, v):
    """Whether there is such a schedule."""
    return m % p == 0 if name == "interleaved" else v == 1


SIZES = itertools.product(NAMES, range(1, 9), range(1, 17), range(1, 4))
CASES = [case for case in SIZES if fits(*case)]
# whole numbers, so that sums are exact; W shorter and longer than F and I
TIMES = [
    EQUAL,
    StageTimes(1, 2, 0),
    StageTimes(2, 3, 1),
    StageTimes(5, 1, 3),
    StageTimes(1, 3, 4),
    StageTimes(0, 1, 1),
]
times = st.builds(StageTimes, *[st.integers(0, 9)] * 3)


@functools.cache
def made(name, p, m, v):
    return schedule(name, p * v, m, p)


def starts(timeline):
    return {row.action: row.start_s for row in timeline.rows}


# ---- formulas


def test_the_simulated_bubble_is_that_of_the_formula():
    for name, p, m, v in CASES:
        for stage_s in TIMES if name == "zero_bubble" else TIMES[:2]:
            case = (name, p, m, v, stage_s)
            timeline = simulate(made(name, p, m, v), stage_s)
            simulated = timeline.bubble_over_ideal()
            assert simulated == bubble_over_ideal(name, p, m, v, stage_s), case
            assert {timeline.bubble_over_ideal(rank) for rank in range(p)} == {simulated}
            over_total = bubble_over_total(name, p, m, v, stage_s)
            assert timeline.bubble_over_total() == pytest.approx(over_total, rel=1e-12, abs=1e-12)


@settings(deadline=None)
@given(st.integers(1, 8), st.integers(1, 24), times.filter(lambda stage_s: stage_s.total_s))
def test_zero_bubble_keeps_to_its_formula_for_any_times(p, m, stage_s):
    timeline = simulate(schedule("zero_bubble", p, m), stage_s)
    assert timeline.bubble_over_ideal() == bubble_over_ideal("zero_bubble", p, m, 1, stage_s)
    forward_s, input_s, weight_s = stage_s.forward_s, stage_s.input_s, stage_s.weight_s
    if m >= p and weight_s <= min(forward_s, input_s):  # where the published formula holds
        assert timeline.bubble_s(0) == (p - 1) * (forward_s + input_s - weight_s)


def test_the_formulas_of_the_papers_by_number():
    for name in ("gpipe", "1f1b"):
        assert bubble_over_ideal(name, 4, 8) == 3 / 8
        assert bubble_over_total(name, 4, 8) == pytest.approx(3 / 11)
    assert bubble_over_ideal("interleaved", 4, 8, 2) == 3 / 16
    assert bubble_over_ideal("zero_bubble", 4, 8) == pytest.approx(3 / 8 / 3)
    # one micro-batch: the naive split, three ranks of four wait
    assert bubble_over_ideal("1f1b", 4, 1) == 3
    assert bubble_over_total("1f1b", 4, 1) == 3 / 4


def test_the_simulated_peak_is_that_of_the_formula():
    for name, p, m, v in CASES:
        timeline = simulate(made(name, p, m, v), EQUAL)
        for rank in range(p):
            expected = peak_microbatches(name, p, m, v, rank)
            assert timeline.peak_microbatches(rank) == expected, (name, p, m, v, rank)
        assert timeline.peak_microbatches() == peak_microbatches(name, p, m, v)


def test_what_the_papers_say_about_memory():
    for p in range(2, 9):
        assert peak_microbatches("gpipe", p, 64) == 64
        assert peak_microbatches("1f1b", p, 64) == p == peak_microbatches("zero_bubble", p, 64)
        assert {peak_microbatches("zero_bubble", p, 64, rank=rank) for rank in range(p)} == {p}
        for v in (2, 3):  # in whole ranks' worth of layers
            assert peak_microbatches("interleaved", p, 8 * p, v) / v == pytest.approx(
                p * (1 + (p - 1) / (p * v))
            )


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (
            ("2f2b", 2, 2),
            "no formula for '2f2b': choose one of gpipe, 1f1b, interleaved, zero_bubble",
        ),
        (("1f1b", 0, 2), "p=0, m=2, v=1: each is at least 1"),
        (("1f1b", 2, 2, 2), "v=2: 1f1b has one stage on each rank; interleaved has more"),
        (("interleaved", 2, 3, 2), "interleaved needs m=3 to be a multiple of p=2"),
    ],
)
def test_formulas_refuse_what_they_do_not_fit(args, words):
    for formula in (bubble_over_ideal, bubble_over_total, peak_microbatches):
        with pytest.raises(ValueError) as caught:
            formula(*args)
        assert str(caught.value) == words


def test_a_peak_of_a_rank_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match=r"^rank 2 is outside a pipeline of 2 ranks \(0 to 1\)$"):
        peak_microbatches("1f1b", 2, 4, rank=2)


# ---- the simulator


def longest_path_s(actions, num_stages, stage_s, message_s):
    """End of the last action, from the graph of what comes before what, without a simulation."""
    rank_of = stage_ranks(actions)
    exists = set(itertools.chain.from_iterable(actions.values()))
    before = {}
    for order in actions.values():
        for place, action in enumerate(order):
            before[action] = {}
            for need in waits_for(action, num_stages):
                if need not in exists:
                    need = need._replace(kind="B")
                travels = rank_of[need.stage] != rank_of[action.stage]
                before[action][need] = message_s if travels else 0
            if place:
                before[action].setdefault(order[place - 1], 0)
    stop = {}
    for action in graphlib.TopologicalSorter(before).static_order():
        ready = [stop[need] + hop for need, hop in before[action].items()]
        stop[action] = max(ready, default=0) + stage_s[action.stage].of(action.kind)
    return max(stop.values())


@settings(deadline=None)
@given(
    st.sampled_from([case for case in CASES if case[2] * case[3] <= 16]),
    st.integers(0, 5),
    st.data(),
)
def test_a_simulation_is_the_longest_path(case, message_s, data):
    _, p, m, v = case
    stage_s = data.draw(st.lists(times, min_size=p * v, max_size=p * v))
    timeline = simulate(made(*case), stage_s, message_s=message_s)
    assert timeline.total_s == longest_path_s(made(*case), p * v, stage_s, message_s)
    for rank in range(p):
        bars = [row for row in timeline.rows if row.rank == rank]
        assert [row.action for row in bars] == made(*case)[rank]
        assert all(first.stop_s <= second.start_s for first, second in itertools.pairwise(bars))
        own_s = sum(stage_s[stage].total_s for stage in range(rank, p * v, p))
        assert timeline.busy_s(rank) == m * own_s
        assert timeline.bubble_s(rank) + timeline.busy_s(rank) == timeline.total_s


def test_ticks_are_a_simulation_in_which_all_actions_take_one_second():
    for name, p, m, v in CASES[::3]:
        one_s = StageTimes(1, 1, 1 if name == "zero_bubble" else 0)  # B = I + W
        timeline = simulate(made(name, p, m, v), one_s)
        table = ticks(made(name, p, m, v), p * v)
        when = {action: tick for row in table.values() for tick, action in enumerate(row) if action}
        assert starts(timeline) == when and timeline.total_s == len(table[0])


def test_a_slow_second_stage_by_hand():
    slow = [StageTimes(1, 1, 1), StageTimes(2, 2, 2)]
    timeline = simulate(schedule("gpipe", 2, 2), slow)
    bars = {str(row.action): (row.start_s, row.stop_s) for row in timeline.rows}
    first = {"0F0": (0, 1), "0F1": (1, 2), "0B0": (9, 11), "0B1": (13, 15)}
    second = {"1F0": (1, 3), "1F1": (3, 5), "1B0": (5, 9), "1B1": (9, 13)}
    assert bars == first | second
    assert timeline.total_s == 15
    assert (timeline.busy_s(0), timeline.busy_s(1), timeline.busy_s()) == (6, 12, 9)
    assert (timeline.bubble_s(0), timeline.bubble_s(1), timeline.bubble_s()) == (9, 3, 6)
    assert timeline.bubble_over_total() == 6 / 15 and timeline.bubble_over_total(1) == 3 / 15
    assert timeline.bubble_over_ideal() == 6 / 9 and timeline.bubble_over_ideal(0) == 9 / 6


def test_messages_delay_each_boundary_of_gpipe_once_in_each_direction():
    for p in range(1, 6):
        for m in (1, 4, 7):
            plain = simulate(schedule("gpipe", p, m), EQUAL)
            delayed = simulate(schedule("gpipe", p, m), EQUAL, message_s=5)
            assert delayed.total_s == plain.total_s + 2 * (p - 1) * 5
            # 1F1B holds forwards back until a backward returns, so slow messages cost it as much
            # at least
            held_back = simulate(schedule("1f1b", p, m), EQUAL, message_s=5)
            assert held_back.total_s >= delayed.total_s


def test_checkpointing_adds_a_forward_to_each_backward_and_keeps_the_bubbles_share():
    for name in ("1f1b", "gpipe", "zero_bubble"):
        timeline = simulate(made(name, 4, 8, 1), EQUAL, activation_checkpointing=True)
        assert timeline.busy_s(2) == 8 * 4
        expected = bubble_over_ideal(name, 4, 8, stage_s=EQUAL.checkpointed())
        assert timeline.bubble_over_ideal() == expected
    timeline = simulate(made("1f1b", 4, 8, 1), EQUAL, activation_checkpointing=True)
    assert timeline.bubble_over_ideal() == 3 / 8


def test_a_measured_timeline_is_read_by_the_same_rules():
    rows = [
        Bar(0, Action("F", 0, 0), 0.0, 0.5),
        Bar(0, Action("B", 0, 0), 3.0, 4.0),
        Bar(1, Action("F", 1, 0), 0.75, 1.25),
    ]
    timeline = Timeline((*rows, Bar(1, Action("B", 1, 0), 1.25, 2.75)))
    assert timeline.ranks == [0, 1]
    assert (timeline.total_s, timeline.busy_s(0), timeline.bubble_s(1)) == (4.0, 1.5, 2.0)
    assert timeline.bubble_over_total(1) == 0.5 and timeline.peak_microbatches() == 1


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: StageTimes(1, -1, 1), "input_s=-1: a stage takes 0 seconds or more"),
        (lambda: StageTimes(float("nan"), 1, 1), "forward_s=nan: a stage takes 0 seconds or more"),
        (
            lambda: simulate(made("1f1b", 3, 2, 1), [EQUAL] * 2),
            "2 stage times for 3 stages: give one for each, or one for all",
        ),
        (
            lambda: simulate(made("1f1b", 3, 2, 1), EQUAL, message_s=-1),
            "message_s=-1: a message takes 0 seconds or more",
        ),
        (
            lambda: simulate({0: [Action.parse("0B0"), Action.parse("0F0")]}, EQUAL),
            "rank 0 cannot start 0B0: it waits for 0F0, which comes later on the same rank: "
            "put it before",
        ),
    ],
)
def test_what_cannot_be_simulated_is_refused_in_one_line(make, words):
    with pytest.raises(ValueError) as caught:
        make()
    assert str(caught.value) == words
