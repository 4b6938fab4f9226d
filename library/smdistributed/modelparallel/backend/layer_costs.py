"""What layers cost relative to each other, and which of them must be on one stage; for both frameworks."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from collections.abc import Set as AbstractSet

STATE_BYTES = 4
"""Bytes in memory per byte of a weight: itself, its gradient, and two moments of Adam."""


def relative_costs(memory: Sequence[float], operations: Sequence[float], memory_weight: float) -> list[float]:
    """Weighs each layer's share of the model's memory and of its operations.

    Args:
        memory: Bytes of each layer.
        operations: Floating point operations of each layer; all 0 if unknown, and then only memory counts.
        memory_weight: From 0 to 1: how much memory counts; operations count the rest.

    Returns:
        The cost of each layer.
    """
    weight = memory_weight if any(operations) else 1.0
    total_memory, total_operations = sum(memory) or 1, sum(operations) or 1
    return [weight * m / total_memory + (1 - weight) * o / total_operations for m, o in zip(memory, operations)]


def group_overlapping(sets: Sequence[AbstractSet[Hashable]]) -> list[list[int]]:
    """Groups sets that have elements in common, directly or through other sets.

    Returns:
        The places of each group's sets, ascending. Sets that overlap no other are left out.
    """
    group_of: dict[Hashable, set[int]] = {}
    for place, elements in enumerate(sets):
        joined = {place}.union(*(group_of[element] for element in elements if element in group_of))
        for member in joined:
            group_of.update(dict.fromkeys(sets[member], joined))
    groups = {id(group): group for group in group_of.values()}
    return [sorted(group) for group in groups.values() if len(group) > 1]
