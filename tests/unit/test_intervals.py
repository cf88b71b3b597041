"""Spans of time as arithmetic, held to counting moments one by one."""

import random

from labcode.perf.intervals import difference, intersection, total, union

MOMENTS = range(40)


def some_spans(rng):
    """Spans between whole moments, perhaps none, perhaps empty ones."""
    spans = []
    for _ in range(rng.randrange(6)):
        start = rng.randrange(40)
        spans.append((start, min(40, start + rng.randrange(9))))
    return spans


def moments_of(spans):
    """The moments in which one of them runs."""
    return {moment for moment in MOMENTS for start, stop in spans if start <= moment < stop}


def test_each_operation_is_that_of_sets_of_moments():
    rng = random.Random(0)
    for _ in range(500):
        raw = some_spans(rng)
        one, other = union(raw), union(some_spans(rng))
        assert moments_of(one) == moments_of(raw)
        assert moments_of(intersection(one, other)) == moments_of(one) & moments_of(other)
        assert moments_of(difference(one, other)) == moments_of(one) - moments_of(other)
        assert total(one) == len(moments_of(raw))
        assert union(one) == one
