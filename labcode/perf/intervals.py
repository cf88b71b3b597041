"""Spans of time as arithmetic: which of them overlap, and how long they are together. No torch.

A `Spans` is a list of (start, stop), sorted, without overlaps; `union` makes one of any spans.
"""

from collections.abc import Iterable

Spans = list[tuple[float, float]]


def union(spans: Iterable[tuple[float, float]]) -> Spans:
    """The time in which at least one of them runs."""
    merged: Spans = []
    for start, stop in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        elif stop > start:
            merged.append((start, stop))
    return merged


def intersection(one: Spans, other: Spans) -> Spans:
    """The time in which both run."""
    found: Spans = []
    i = 0
    j = 0
    while i < len(one) and j < len(other):
        start = max(one[i][0], other[j][0])
        stop = min(one[i][1], other[j][1])
        if stop > start:
            found.append((start, stop))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return found


def difference(one: Spans, other: Spans) -> Spans:
    """The time in which `one` runs and `other` does not."""
    if not one:
        return []
    ends = (one[0][0], one[-1][1])
    gaps: Spans = []
    free_from = ends[0]
    for start, stop in other:
        if start > free_from:
            gaps.append((free_from, start))
        free_from = max(free_from, stop)
    if free_from < ends[1]:
        gaps.append((free_from, ends[1]))
    return intersection(one, gaps)


def total(spans: Spans) -> float:
    """How long they are together."""
    return sum(stop - start for start, stop in spans)
