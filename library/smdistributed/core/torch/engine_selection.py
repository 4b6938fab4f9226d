"""Selects the communication engine of a torch.distributed group, with gloo or MPI between hosts. Opens its stores."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import cache, partial
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, HashStore, PrefixStore, Store, TCPStore
from torch.distributed.rendezvous import rendezvous

from smdistributed.core import engine_selection
from smdistributed.core.engine_selection import Network, RankGroup
from smdistributed.core.engines import Engine
from smdistributed.core.flat import Flat
from smdistributed.core.launch import Address, Launch, no_master_error
from smdistributed.core.mpi import mpi_network
from smdistributed.core.torch.devices import nccl_error, nccl_problem
from smdistributed.core.torch.tensors import tensor_at


def open_engine(store: Store, rank: int, size: int, timeout: timedelta, gloo: object) -> tuple[Engine, str]:
    """Opens the communication engine of a group, and returns it and its name with the reason for the choice.

    Raises SMDDPError if SMDDP_ENGINE is invalid, or requests shared memory, MPI or NCCL that is unavailable.
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


_CONNECT = timedelta(seconds=30)


def open_store(launch: Launch) -> Store:
    """Opens the job's store: in memory, at the master's address, or in the session directory.

    Raises LaunchError if several ranks have neither an address nor a directory in common.
    """
    if launch.world_size == 1:
        return HashStore()
    if launch.master is not None:
        return _store_at(launch.master, launch)
    if launch.session_dir is not None:
        return FileStore(str(launch.session_dir / "smdistributed-store"), launch.world_size)
    raise no_master_error(launch)


def _store_at(master: Address, launch: Launch) -> Store:
    """Opens the store by torch's own rendezvous: it knows when torchrun's agent, and not rank 0, serves it."""
    host = f"[{master.host}]" if ":" in master.host else master.host
    store: Store
    store, _, _ = next(rendezvous(f"tcp://{host}:{master.port}", launch.rank, launch.world_size))
    return store


def connect_again(store: Store) -> Store:
    """Opens another connection to a TCPStore, shared by this process's monitors; other stores are returned.

    torch allows one call at a time in a connection, however long it waits for a value.
    """
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return _connection(store.host, store.port) if isinstance(store, TCPStore) else store


@cache
def _connection(host: str, port: int) -> Store:
    return TCPStore(host, port, is_master=False, timeout=_CONNECT, wait_for_workers=False)
