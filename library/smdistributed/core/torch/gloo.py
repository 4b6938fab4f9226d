"""torch's gloo between hosts: what `NetworkEngine` asks of a transport."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from smdistributed.core.flat import Flat
from smdistributed.core.engine_selection import Network, RankGroup
from smdistributed.core.torch.tensors import tensor_at


def gloo_network(group: RankGroup, store: Store, gloo: Any) -> Network:
    """gloo between the ranks of a group. store: the group's. gloo: torch's own group of the same ranks."""
    return Network("gloo", partial(_across, group, store, gloo))


def _across(group: RankGroup, store: Store, gloo: Any, ranks: Sequence[int]) -> GlooTransport:
    if len(ranks) == group.size:
        return GlooTransport(gloo)
    place, timeout = list(ranks).index(group.rank), timedelta(seconds=group.seconds)
    return GlooTransport(dist.ProcessGroupGloo(PrefixStore(f"across-{ranks[0]}", store), place, len(ranks), timeout))


class GlooTransport:
    """Messages between the ranks of a group of torch's."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def send(self, message: Flat, rank: int, tag: int) -> Any:
        return self._group.send([tensor_at(message)], rank, tag)

    def recv(self, message: Flat, rank: int, tag: int) -> Any:
        return self._group.recv([tensor_at(message)], rank, tag)

    def barrier(self) -> Any:
        return self._group.barrier()

    def set_timeout(self, seconds: float) -> None:
        self._group.set_timeout(timedelta(seconds=seconds))
