"""`shard_optimizer_state`: each replica keeps the optimizer's state of its share of the parameters (AWS API)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from smdistributed.modelparallel.backend.partition import assign_owners
from smdistributed.modelparallel.torch.script.gradients import broadcast_in_buckets


class OptimizerShards:
    """Which replica updates which parameter of this stage. `ranks`: of RDP_GROUP, which hold the same parameters."""

    def __init__(self, ranks: Sequence[int], rank: int, group: Any) -> None:
        self._ranks, self._mine, self._group = ranks, ranks.index(rank), group
        self._owners: dict[nn.Parameter, int] = {}

    def assign(self, parameters: Sequence[nn.Parameter]) -> None:
        """Gives new parameters an owner once, trained yet or not: the state stays there."""
        for trained in (True, False):
            new = [p for p in parameters if p.numel() and p.requires_grad is trained and p not in self._owners]
            self._owners.update(zip(new, assign_owners([p.numel() for p in new], len(self._ranks))))

    def select_own(self, states: Mapping[int, Any], parameters: Sequence[nn.Parameter]) -> dict[int, Any]:
        """Selects states, by number, of this replica's own parameters, and of those without an owner."""
        return {i: value for i, value in states.items() if self._owners.get(parameters[i], self._mine) == self._mine}

    def step(self, step: Callable[[], Any], parameters: Sequence[nn.Parameter]) -> Any:
        """Updates this replica's share, and broadcasts each share from its owner. All ranks of the group call it.

        `parameters` have gradients, and the same order on all ranks.
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
