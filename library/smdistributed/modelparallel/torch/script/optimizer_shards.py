"""`shard_optimizer_state`: each replica updates its own share of the parameters of its stage (AWS API 1.6).

It keeps the averaged gradients, the single-precision copies and the optimizer's state of its share alone. After an
update it sends its parameters to the other replicas.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from smdistributed.modelparallel.backend.partition import assign_owners
from smdistributed.modelparallel.torch.script.buckets import broadcast_in_buckets


class OptimizerShards:
    """Which replica owns which of the placed parameters. `ranks`: of RDP_GROUP, which hold the same parameters.

    Owners do not change, so that the state stays where it is. A parameter that does not belong to the model has no
    owner, and every replica updates its own.
    """

    def __init__(self, ranks: Sequence[int], rank: int, group: Any, parameters: Iterable[nn.Parameter]) -> None:
        self.ranks, self.mine, self._group = ranks, ranks.index(rank), group
        self._owners: dict[nn.Parameter, int] = {}
        self._trained: set[nn.Parameter] = set()
        given = [parameter for parameter in parameters if parameter.numel()]
        for trained in (True, False):  # layers that are unfrozen later are divided evenly too
            its = [parameter for parameter in given if parameter.requires_grad is trained]
            self._owners.update(zip(its, assign_owners([p.numel() for p in its], len(ranks))))

    def owner_of(self, parameter: nn.Parameter) -> int:
        """The place in `ranks` of the replica that owns a parameter of the model; this one if it has no owner."""
        return self._owners.get(parameter, self.mine)

    def owns(self, parameter: nn.Parameter) -> bool:
        return self.owner_of(parameter) == self.mine

    def select_own(self, values: Mapping[Any, Any], parameters: Sequence[nn.Parameter]) -> dict[Any, Any]:
        """Selects values, by the numbers of parameters, of this replica's own. Other keys stay."""
        known = range(len(parameters))
        return {key: value for key, value in values.items() if key not in known or self.owns(parameters[key])}

    def is_reduced_to_owner(self, ranks: Sequence[int]) -> bool:
        """Whether gradients that are averaged over `ranks` need only reach one of them."""
        return tuple(ranks) == tuple(self.ranks)

    def reduce(self, flat: Any, owner: int) -> Any:
        """Starts to sum a vector of all replicas at its owner. Returns the work, which is not waited for."""
        return dist.reduce(flat, self.ranks[owner], group=self._group, async_op=True)

    def send_updated(self) -> None:
        """Sends each parameter that was ever trained from its owner to the other replicas. All of them call it."""
        self._trained.update(parameter for parameter in self._owners if parameter.requires_grad)
        for owner, rank in enumerate(self.ranks):
            # A layer that is frozen now may have a gradient of an earlier step.
            owned = [p.data for p, other in self._owners.items() if other == owner and p in self._trained]
            broadcast_in_buckets(owned, self._group, rank)
