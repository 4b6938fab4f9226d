"""`shard_optimizer_state`: each replica keeps the optimizer's state of its share of the parameters (AWS API)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from smdistributed.modelparallel.torch.reducer import broadcast_in_buckets


class OptimizerShards:
    """Which replica updates which parameter of this stage.

    Args:
        ranks: The ranks of RDP_GROUP, which hold the same parameters.
        rank: This rank.
        group: torch.distributed's group of `ranks`.
    """

    def __init__(self, ranks: Sequence[int], rank: int, group: Any) -> None:
        self._ranks, self._mine, self._group = ranks, ranks.index(rank), group
        self._owners: dict[nn.Parameter, int] = {}

    def assign(self, parameters: Sequence[nn.Parameter]) -> None:
        """Gives new parameters an owner: once, whether they are trained yet or not, because the state stays there.

        Parameters without elements, of other stages, get none.
        """
        for trained in (True, False):
            new = [p for p in parameters if p.numel() and p.requires_grad is trained and p not in self._owners]
            self._owners.update(zip(new, assign_owners(new, len(self._ranks))))

    def select_own(self, states: Mapping[int, Any], parameters: Sequence[nn.Parameter]) -> dict[int, Any]:
        """Selects the states that this replica keeps: of its own parameters, and of those without an owner.

        Args:
            states: By the parameters' numbers.
            parameters: In the order of their numbers.
        """
        return {i: value for i, value in states.items() if self._owners.get(parameters[i], self._mine) == self._mine}

    def step(self, step: Callable[[], Any], parameters: Sequence[nn.Parameter]) -> Any:
        """Updates this replica's share, and broadcasts each share from its owner; all ranks of the group call it.

        Args:
            step: Updates all parameters that have gradients.
            parameters: Those that have gradients, in the same order on all ranks.

        Returns:
            The result of `step`.
        """
        owners = [self._owners[parameter] for parameter in parameters]
        others = {p: p.grad for p, owner in zip(parameters, owners) if owner != self._mine}
        for parameter in others:
            parameter.grad = None
        result = step()
        for parameter, gradient in others.items():
            parameter.grad = gradient
        for owner, rank in enumerate(self._ranks):
            owned = [parameter.data for parameter, other in zip(parameters, owners) if other == owner]
            broadcast_in_buckets(owned, self._group, rank)
        return result


def assign_owners(parameters: Iterable[torch.Tensor], replicas: int) -> list[int]:
    """Divides parameters between replicas: the largest first, each to the replica with the fewest elements so far.

    Args:
        parameters: Of any shape.
        replicas: How many there are.

    Returns:
        The replica of each parameter, from 0.
    """
    sizes = [parameter.numel() for parameter in parameters]
    owners, loads = [0] * len(sizes), [0] * replicas
    for place in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        owners[place] = loads.index(min(loads))
        loads[owners[place]] += sizes[place]
    return owners
