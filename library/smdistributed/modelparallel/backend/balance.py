"""Cuts a sequence of modules into stages of almost equal cost.

The largest stage costs at most `SLACK` times the largest stage of the best contiguous cut. Of such cuts it takes one
that splits the fewest containers, because each split container adds calls between stages; of these, the most even one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from smdistributed.modelparallel.backend.exceptions import SMPConfigError

SLACK = 1.03
_BISECTIONS = 100
_MOST_CHOICES = 64


@dataclass(frozen=True)
class Cut:
    """stages: the stage of every item. largest: the cost of the largest stage. optimum: the same for the best cut."""

    stages: tuple[int, ...]
    largest: float
    optimum: float


def cut(costs: Sequence[float], names: Sequence[str], together: Sequence[Sequence[int]], stages: int) -> Cut:
    """Assigns items to stages, in the order of their execution.

    Args:
        costs: The cost of each item.
        names: The dotted name of each item, as modules have them.
        together: Groups of places of items that must be on one stage. A group counts at its first or at its last
            item, depending on the better balance.
        stages: The number of stages.

    Returns:
        The cut.

    Raises:
        SMPConfigError: If there are fewer items, or groups, than stages.
    """
    cuts = [_cut_anchored(costs, names, groups, stages) for groups in anchored(together)]
    best = min(cuts, key=lambda found: found.largest)
    return replace(best, optimum=min(found.optimum for found in cuts))


def anchored(together: Sequence[Sequence[int]]) -> Iterator[dict[int, Sequence[int]]]:
    """Yields groups by the places where they count: all combinations of first and last items, up to a limit."""
    ends = [(min(group), max(group)) for group in together]
    for anchors in itertools.islice(itertools.product(*ends), _MOST_CHOICES):
        yield dict(zip(anchors, together))


def _cut_anchored(costs: Sequence[float], names: Sequence[str], groups: dict[int, Sequence[int]], stages: int) -> Cut:
    """Cuts items into stages if each group counts at one place, its key. Raises SMPConfigError for too few items."""
    members = {place: anchor for anchor, group in groups.items() for place in group}
    kept = [place for place in range(len(costs)) if members.get(place, place) == place]
    if len(kept) < stages:
        raise SMPConfigError(
            f"'partitions' is {stages}, but the model has {len(kept)} modules that can be on stages of their own: "
            "use fewer partitions."
        )
    merged = [sum(costs[member] for member in groups.get(place, (place,))) for place in kept]
    optimum = largest_of(merged, _greedy(merged, stages))
    begins = _fewest_splits(merged, [names[place] for place in kept], stages, optimum * SLACK)
    stage_of = {place: stage for stage, places in enumerate(_segments(kept, begins)) for place in places}
    return Cut(
        tuple(stage_of[members.get(place, place)] for place in range(len(costs))), largest_of(merged, begins), optimum
    )


def largest_of(costs: Sequence[float], begins: Sequence[int]) -> float:
    """Returns the cost of the largest segment. `begins` are the places where segments begin; the first is 0."""
    return max(sum(segment) for segment in _segments(costs, begins))


def _segments(items: Sequence[float] | Sequence[int], begins: Sequence[int]) -> list[Sequence[float]]:
    """Returns the consecutive parts of `items` that begin at these places."""
    return [items[begin:end] for begin, end in zip(begins, [*begins[1:], len(items)])]


def _greedy(costs: Sequence[float], stages: int) -> list[int]:
    """Returns the begins of the best contiguous cut, by bisection of the largest cost that a stage may have."""
    low, high = max(costs), sum(costs)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if len(_fill(costs, middle, stages)) <= stages:
            high = middle
        else:
            low = middle
    return _fill(costs, high * (1 + 1e-12), stages)


def _fill(costs: Sequence[float], limit: float, stages: int) -> list[int]:
    """Finds the begins of segments, each filled up to the limit: `stages` of them, or more if the limit is too low."""
    begins, size = [0], 0.0
    for place, cost in enumerate(costs):
        must = len(costs) - place == stages - len(begins)
        if place and (size + cost > limit or must):
            begins.append(place)
            size = 0.0
        size += cost
    return begins


def _fewest_splits(costs: Sequence[float], names: Sequence[str], stages: int, limit: float) -> list[int]:
    """Finds the begins of `stages` segments within the limit: the shallowest cuts, and of these the most even."""
    count = len(costs)
    before = [0.0, *itertools.accumulate(costs)]
    depth = [0, *(_common_depth(one, other) for one, other in zip(names, names[1:]))]
    # best[end], for a cut of the first `end` items: the sum of depths, the largest segment, where the last one begins.
    best: list[dict[int, tuple[int, float, int]]] = [{0: (0, 0.0, -1)}]
    for _ in range(stages):
        step: dict[int, tuple[int, float, int]] = {}
        for end in range(1, count + 1):
            options = [
                (best[-1][begin][0] + depth[begin], max(best[-1][begin][1], before[end] - before[begin]), begin)
                for begin in _possible_begins(before, end, limit * (1 + 1e-9))
                if begin in best[-1]
            ]
            if options:
                step[end] = min(options)
        best.append(step)
    begins, end = [], count
    for level in reversed(best[1:]):
        end = level[end][2]
        begins.append(end)
    return begins[::-1]


def _possible_begins(before: Sequence[float], end: int, limit: float) -> list[int]:
    """Returns where a segment up to `end` may begin so that it costs at most `limit`; the last place first."""
    found = []
    for begin in range(end - 1, -1, -1):
        if before[end] - before[begin] > limit:
            break
        found.append(begin)
    return found


def _common_depth(one: str, other: str) -> int:
    """The depth of the smallest container of both."""
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one.split("."), other.split(".")))
    return sum(1 for _ in pairs)
