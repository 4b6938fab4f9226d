"""Set operations on times: tuples of disjoint half-open intervals in ascending order, as `union` returns them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable

Interval = tuple[int, int]
Intervals = tuple[Interval, ...]


def union(intervals: Iterable[Interval]) -> Intervals:
    """Returns the times that are in any of the intervals, which may overlap and be in any order.

    Intervals that touch become one. Empty ones are left out.
    """
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if end <= begin:
            continue
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return tuple(merged)


def intersection(ones: Intervals, others: Intervals) -> Intervals:
    """Returns the times that are in both."""
    common: list[Interval] = []
    one = other = 0
    while one < len(ones) and other < len(others):
        begin, end = max(ones[one][0], others[other][0]), min(ones[one][1], others[other][1])
        if begin < end:
            common.append((begin, end))
        if ones[one][1] < others[other][1]:
            one += 1
        else:
            other += 1
    return tuple(common)


def difference(ones: Intervals, others: Intervals) -> Intervals:
    """Returns the times in `ones` that are not in `others`."""
    if not ones:
        return ()
    begin, end = ones[0][0], ones[-1][1]
    edges = [begin, *(edge for interval in others for edge in interval), end]
    return intersection(ones, union(zip(edges[::2], edges[1::2], strict=True)))


def clip(intervals: Intervals, begin: int, end: int) -> Intervals:
    """Returns the times from `begin` to `end`. Fast if that is a small part."""
    first = bisect_right(intervals, begin, key=lambda interval: interval[1])
    last = bisect_left(intervals, end, key=lambda interval: interval[0])
    return intersection(intervals[first:last], ((begin, end),))


def length(intervals: Intervals) -> int:
    """Returns the sum of the lengths."""
    return sum(end - begin for begin, end in intervals)
