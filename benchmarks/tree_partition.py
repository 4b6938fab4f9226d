"""The published algorithm of automatic partition, the rival of `smdistributed.modelparallel`'s own.

It follows a summary of the publication (arXiv 2111.05972), not code. Devices go down the tree of modules, by level.
If a node has several devices, its children are cut into that many contiguous segments, with the lowest possible maximum
cost. D'Hondt's method deals the devices to the segments. A segment of several modules that gets several devices is cut
again. A single module passes them on to its children.

The summary leaves open who computes a segment that gets no device: here the device before it does. Nor does it say
where modules count that share a parameter: here, as in the library, at the better end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from smdistributed.modelparallel.backend.partition import anchored


def tree_partition(
    names: Sequence[str], costs: Sequence[float], together: Sequence[Sequence[int]], devices: int
) -> list[int]:
    """The device of every module; with the arguments of `balance.cut`. As there, a group counts at its better end."""
    found = [_anchored(names, costs, groups, devices) for groups in anchored(together)]
    return min(found, key=lambda placed: _largest(costs, placed, devices))


def _anchored(
    names: Sequence[str], costs: Sequence[float], groups: dict[int, Sequence[int]], devices: int
) -> list[int]:
    moved = list(costs)
    for anchor, group in groups.items():
        for place in group:
            moved[place] = 0.0
        moved[anchor] = sum(costs[place] for place in group)
    placed = _Tree(names, moved).place(devices)
    for anchor, group in groups.items():
        for place in group:
            placed[place] = placed[anchor]
    return placed


class _Tree:
    """Nodes by name, which is dotted; children in the order in which modules are named."""

    def __init__(self, names: Sequence[str], costs: Sequence[float]) -> None:
        self._names = names
        self._costs = {"": 0.0}
        self._children: dict[str, list[str]] = {"": []}
        for name, cost in zip(names, costs):
            for node in reversed([name, *_containers(name)]):
                self._add(node)
                self._costs[node] += cost

    def _add(self, node: str) -> None:
        if node not in self._children:
            self._children[node], self._costs[node] = [], 0.0
            self._children[_parent(node)].append(node)

    def place(self, devices: int) -> list[int]:
        """The device of each module: the first of those that its node gets."""
        given = {"": list(range(devices))}
        waiting = deque([""])
        while waiting:
            node = waiting.popleft()
            for child, share in self._deal(self._children[node], given[node]):
                given[child] = share
                waiting.append(child)
        return [given[name][0] for name in self._names]

    def _deal(self, nodes: Sequence[str], devices: list[int]) -> Iterator[tuple[str, list[int]]]:
        if len(devices) == 1 or len(nodes) <= 1:
            yield from ((node, devices) for node in nodes)
            return
        costs = [self._costs[node] for node in nodes]
        bounds = segments(costs, min(len(devices), len(nodes)))
        seats = dhondt([sum(costs[begin:end]) for begin, end in bounds], len(devices))
        dealt = 0
        for (begin, end), count in zip(bounds, seats):
            share = devices[dealt : dealt + count] or [devices[max(dealt - 1, 0)]]
            yield from self._deal(nodes[begin:end], share)
            dealt += count


def segments(costs: Sequence[float], count: int) -> list[tuple[int, int]]:
    """The bounds of `count` contiguous segments with the lowest possible maximum cost."""
    ends = range(len(costs) + 1)
    before = [sum(costs[:end]) for end in ends]
    # best[k][end]: the largest of k segments of the first `end`, and where the last of them begins.
    best: list[dict[int, tuple[float, int]]] = [{0: (0.0, 0)}]
    for _ in range(count):
        last = best[-1]
        options = {end: [begin for begin in last if begin < end] for end in ends}
        best.append(
            {
                end: min((max(last[begin][0], before[end] - before[begin]), begin) for begin in begins)
                for end, begins in options.items()
                if begins
            }
        )
    found, end = [], len(costs)
    for level in reversed(best[1:]):
        found.append((level[end][1], end))
        end = level[end][1]
    return found[::-1]


def dhondt(votes: Sequence[float], seats: int) -> list[int]:
    """Seats by votes: each goes to the most votes a seat, that one counted."""
    dealt = [0] * len(votes)
    for _ in range(seats):
        winner = max(range(len(votes)), key=lambda party: votes[party] / (dealt[party] + 1))
        dealt[winner] += 1
    return dealt


def _largest(costs: Sequence[float], placed: Sequence[int], devices: int) -> float:
    return max(sum(cost for cost, at in zip(costs, placed) if at == device) for device in range(devices))


def _containers(name: str) -> Iterator[str]:
    """The containers of a module, from the innermost to the model itself."""
    while name:
        name = _parent(name)
        yield name


def _parent(name: str) -> str:
    return name.rpartition(".")[0]
