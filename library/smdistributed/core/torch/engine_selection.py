"""Selects the communication engine of a torch.distributed group, with gloo or MPI between hosts."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from smdistributed.core import engine_selection
from smdistributed.core.engine_selection import Network, RankGroup
from smdistributed.core.engines import Engine
from smdistributed.core.flat import Flat
from smdistributed.core.mpi import mpi_network
from smdistributed.core.torch.devices import nccl_error, nccl_problem
from smdistributed.core.torch.rendezvous import connect_again
from smdistributed.core.torch.tensors import tensor_at


def open_engine(store: Store, rank: int, size: int, timeout: timedelta, gloo: object) -> tuple[Engine, str]:
    """Opens the communication engine of a group, and returns it and its name with the reason for the choice.

    Raises:
        SMDDPError: If SMDDP_ENGINE is invalid, or requests shared memory, MPI or NCCL that is unavailable.
    """
    requested, later = engine_selection.requested_engine(), dist.is_initialized()
    problem = nccl_problem(PrefixStore("nccl", store), rank, size) if requested == "nccl" else ""
    if problem:
        raise nccl_error(problem)
    group = RankGroup(
        *(store, rank, size, timeout.total_seconds(), lambda: connect_again(store)),
        number=dist.get_rank() if later else rank,
        is_first=not later,
    )
    network = mpi_network(group) if requested == "mpi" else Network("gloo", partial(_connect_gloo, group, store, gloo))
    return engine_selection.open_engine(group, network, requested)


def _connect_gloo(group: RankGroup, store: Store, gloo: Any, ranks: Sequence[int]) -> GlooTransport:
    """Connects ranks by gloo: all of them by the group's own, some by another group that these ranks open."""
    if len(ranks) == group.size:
        return GlooTransport(gloo)
    place, timeout = list(ranks).index(group.rank), timedelta(seconds=group.seconds)
    return GlooTransport(dist.ProcessGroupGloo(PrefixStore(f"across-{ranks[0]}", store), place, len(ranks), timeout))


class GlooTransport:
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
