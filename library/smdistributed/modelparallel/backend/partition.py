"""Partitions: the costs of layers, the cut into stages of almost equal cost, and how a partition is printed.

The largest stage costs at most `SLACK` times the largest stage of the best contiguous cut. Of such cuts it takes one
that splits the fewest containers, because each split container adds calls between stages; of these, the most even one.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from smdistributed.modelparallel.backend.exceptions import SMPConfigError

STATE_BYTES = 4
"""Bytes in memory per byte of a weight: itself, its gradient, and two moments of Adam."""
SLACK = 1.03
_BISECTIONS = 100
_MOST_CHOICES = 64


@dataclass(frozen=True)
class Partition:
    """Which stage has which module."""

    stages: dict[str, int]
    """The stage of every module, by name."""
    shares: tuple[float, ...]
    """The share of every stage in the model's cost."""
    gap: float
    """The cost of the largest stage, relative to the largest stage of the best cut."""

    def __str__(self) -> str:
        count = len(self.shares)
        stages = "1 stage" if count == 1 else f"{count} stages"
        lines = [f"The model is on {stages}, the largest {self.gap:.3f} times the largest of the best cut."]
        for stage, share in enumerate(self.shares):
            roots = ", ".join(_roots(self.stages, stage)) or "code of the model itself"
            lines.append(f"  stage {stage}: {share:6.1%}  {roots}")
        return "\n".join(lines)


def shares(costs: Sequence[float], stages: Sequence[int], count: int) -> tuple[float, ...]:
    """The share of each of `count` stages in the cost of all items; `stages` has the stage of every item."""
    total = sum(costs) or 1
    return tuple(sum(cost for cost, at in zip(costs, stages) if at == stage) / total for stage in range(count))


def _roots(stages: Mapping[str, int], stage: int) -> Iterator[str]:
    """Yields the names of the largest modules that are completely on a stage."""
    whole = {name for name in stages if all(s == stage for other, s in stages.items() if _is_in(other, name))}
    roots = (name for name in stages if name in whole and (not name or name.rpartition(".")[0] not in whole))
    return (name or "the model" for name in roots)


def _is_in(name: str, container: str) -> bool:
    return not container or name == container or name.startswith(f"{container}.")


def relative_costs(memory: Sequence[float], operations: Sequence[float], memory_weight: float) -> list[float]:
    """Weighs each layer's share of memory and operations. If operations are all 0, only memory counts."""
    weight = memory_weight if any(operations) else 1.0
    total_memory, total_operations = sum(memory) or 1, sum(operations) or 1
    return [weight * m / total_memory + (1 - weight) * o / total_operations for m, o in zip(memory, operations)]


def group_overlapping(sets: Sequence[AbstractSet[Hashable]]) -> list[list[int]]:
    """Groups the places of sets that overlap, also through other sets. Sets that overlap no other are left out."""
    group_of: dict[Hashable, set[int]] = {}
    for place, elements in enumerate(sets):
        joined = {place}.union(*(group_of[element] for element in elements if element in group_of))
        for member in joined:
            group_of.update(dict.fromkeys(sets[member], joined))
    groups = {id(group): group for group in group_of.values()}
    return [sorted(group) for group in groups.values() if len(group) > 1]


def assign_owners(sizes: Sequence[int], replicas: int) -> list[int]:
    """Returns the replica of each parameter: the largest first, each to the replica with the fewest elements so far."""
    owners, loads = [0] * len(sizes), [0] * replicas
    for place in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        owners[place] = loads.index(min(loads))
        loads[owners[place]] += sizes[place]
    return owners


@dataclass(frozen=True)
class Cut:
    """stages: the stage of every item. largest: the cost of the largest stage. optimum: the same for the best cut."""

    stages: tuple[int, ...]
    largest: float
    optimum: float


def cut(costs: Sequence[float], names: Sequence[str], together: Sequence[Sequence[int]], stages: int) -> Cut:
    """Assigns items to stages, in the order of execution. Raises SMPConfigError for fewer items than stages.

    `together` has groups of places that must be on one stage. A group counts at its first or at its last item,
    depending on the better balance.
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
            f"'partitions' is {stages}, but the model has {len(kept)} modules that can be on stages of their own. "
            f"Fix: set 'partitions' to {len(kept)} or less."
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
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one.split("."), other.split(".")))
    return sum(1 for _ in pairs)
