"""The engines behind the backend: how the ranks of a group exchange flat tensors (see `tensors`).

`OnHost` goes through shared memory, `AcrossHosts` through torch's own gloo, and `OnHosts` through both, so that each
byte leaves a host once. All have the same methods, `Engine`; `root` -1 means all ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from smdistributed.core import shared_memory
from smdistributed.core.shared_memory import CollectiveError, SharedMemory
from smdistributed.dataparallel.torch.tensors import DTYPES, as_bytes, divide, reduce, size_of

_Tensor = torch.Tensor
_Tensors = Sequence[torch.Tensor]
SHORT_BYTES = 32 << 10  # below, a message more costs more than a byte more
PIECE_BYTES = 4 << 20  # of all_reduce: the first and the last piece overlap with nothing
MESSAGE_BYTES = 64 << 10  # at least, where the ranks are so many that their shards of a piece are short
_TAG = 0x7FFFFFFF  # of messages: no other that somebody sends on the same group has it


class Engine(Protocol):
    """Collectives of flat tensors; every method is called by all ranks of the group, in the same order."""

    def reduces(self, dtype: torch.dtype, op: str) -> bool:
        """Whether there is such a reduction of such elements."""

    def all_reduce(self, flat: _Tensor, op: str, root: int = -1) -> None:
        """Combine `flat` over the ranks, in place; elsewhere than on the root it is left as it was."""

    def broadcast(self, flat: _Tensor, root: int) -> None:
        """Copy the root's into that of every rank."""

    def gather(self, flat: _Tensor, outputs: _Tensors, root: int = -1) -> None:
        """Copy every rank's `flat` into that of `outputs` which has its number."""

    def scatter(self, inputs: _Tensors, flat: _Tensor, root: int) -> None:
        """Copy that of the root's `inputs` which has a rank's number into that rank's `flat`."""

    def reduce_scatter(self, inputs: _Tensors, flat: _Tensor, op: str) -> None:
        """Combine, over the ranks, that of `inputs` which has this rank's number into `flat`."""

    def all_to_all(self, inputs: _Tensors, outputs: _Tensors) -> None:
        """Copy each of `inputs` to the rank of that number, and what that gives into `outputs`; sizes may differ."""

    def barrier(self) -> None:
        """Wait until every rank is here."""

    def set_timeout(self, seconds: float) -> None:
        """Set how long ranks wait for each other."""

    def close(self) -> None:
        """Give up what the engine holds."""


class OnHost:
    """The ranks of one host, through memory that they share."""

    def __init__(self, shared: SharedMemory) -> None:
        self._shared = shared

    def reduces(self, dtype: torch.dtype, op: str) -> bool:
        return shared_memory.reduces(DTYPES.get(dtype, ""), op)

    def all_reduce(self, flat: _Tensor, op: str, root: int = -1) -> None:
        self._shared.all_reduce(flat.data_ptr(), flat.numel(), DTYPES[flat.dtype], op, root)

    def broadcast(self, flat: _Tensor, root: int) -> None:
        self._shared.broadcast(flat.data_ptr(), size_of(flat), root)

    def gather(self, flat: _Tensor, outputs: _Tensors, root: int = -1) -> None:
        self._shared.gather(flat.data_ptr(), _addresses(outputs), size_of(flat), root)

    def scatter(self, inputs: _Tensors, flat: _Tensor, root: int) -> None:
        self._shared.scatter(_addresses(inputs), flat.data_ptr(), size_of(flat), root)

    def reduce_scatter(self, inputs: _Tensors, flat: _Tensor, op: str) -> None:
        self._shared.reduce_scatter(_addresses(inputs), flat.data_ptr(), flat.numel(), DTYPES[flat.dtype], op)

    def all_to_all(self, inputs: _Tensors, outputs: _Tensors) -> None:
        self._shared.all_to_all(
            *(_addresses(inputs), [size_of(flat) for flat in inputs]),
            *(_addresses(outputs), [size_of(flat) for flat in outputs]),
        )

    def barrier(self) -> None:
        self._shared.barrier()

    def set_timeout(self, seconds: float) -> None:
        self._shared.seconds = seconds

    def close(self) -> None:
        self._shared.close()


class AcrossHosts:
    """Ranks anywhere, through gloo. It moves bytes; what is reduced is reduced here, in the order of the ranks.

    gloo reduces few dtypes, knows no average, and its order of summation follows its ring.
    """

    def __init__(self, gloo: Any, rank: int, size: int) -> None:
        self._gloo, self._rank, self._size = gloo, rank, size

    def reduces(self, dtype: torch.dtype, op: str) -> bool:
        try:
            reduce([torch.ones(1, dtype=dtype)] * 2, torch.ones(1, dtype=dtype), op)
        except (KeyError, RuntimeError):  # no such reduction at all, or none of this dtype
            return False
        return True

    def all_reduce(self, flat: _Tensor, op: str, root: int = -1) -> None:
        whole = flat.numel() // self._size * self._size if size_of(flat) > SHORT_BYTES else 0
        result = flat if root in (-1, self._rank) else flat.clone()
        take_turns(self.all_reduce_stages(piece, op) for piece in pieces(result[:whole], self._size))
        if whole < flat.numel():
            rest = torch.empty(self._size, flat.numel() - whole, dtype=flat.dtype)
            self.gather(flat[whole:], list(rest))
            reduce(list(rest), result[whole:], op)

    def all_reduce_stages(self, flat: _Tensor, op: str) -> Iterator[None]:
        """Combine `flat` over the ranks, in place; yields when there is nothing to do until messages have come.

        The number of elements must be a multiple of that of the ranks.
        """
        shards = flat.chunk(self._size)
        mine = shards[self._rank]
        parts = list(torch.empty(self._size, mine.numel(), dtype=mine.dtype))
        parts[self._rank] = mine
        messages = self._exchange(shards, parts)
        yield
        self._wait(*messages)
        reduce(parts, mine, op)
        messages = self._exchange([mine] * self._size, shards)
        yield
        self._wait(*messages)

    def _exchange(self, inputs: _Tensors, outputs: _Tensors) -> list[Any]:
        """Start to send to each other rank what has its number, and to receive from it, where that is not empty.

        Straight from and into the tensors: gloo's own all_to_all wants them in one piece, which is two copies more.
        """
        others = [rank for rank in range(self._size) if rank != self._rank]
        received, sent = ({rank: as_bytes(flats[rank]) for rank in others} for flats in (outputs, inputs))
        return [
            *(self._gloo.recv([flat], rank, _TAG) for rank, flat in received.items() if flat.numel()),
            *(self._gloo.send([flat], rank, _TAG) for rank, flat in sent.items() if flat.numel()),
        ]

    def broadcast(self, flat: _Tensor, root: int) -> None:
        if flat.numel():
            options = dist.BroadcastOptions()
            options.rootRank, options.rootTensor = root, 0
            self._wait(self._gloo.broadcast([as_bytes(flat)], options))

    def gather(self, flat: _Tensor, outputs: _Tensors, root: int = -1) -> None:
        if not flat.numel():
            return
        received = list(map(as_bytes, outputs))
        if root < 0:
            self._wait(self._gloo.allgather([received], [as_bytes(flat)]))
            return
        options = dist.GatherOptions()
        options.rootRank = root
        self._wait(self._gloo.gather([received] if received else [], [as_bytes(flat)], options))

    def scatter(self, inputs: _Tensors, flat: _Tensor, root: int) -> None:
        if flat.numel():
            options = dist.ScatterOptions()
            options.rootRank = root
            given = list(map(as_bytes, inputs))
            self._wait(self._gloo.scatter([as_bytes(flat)], [given] if given else [], options))

    def reduce_scatter(self, inputs: _Tensors, flat: _Tensor, op: str) -> None:
        parts = torch.empty(self._size, flat.numel(), dtype=flat.dtype)
        self.all_to_all(inputs, list(parts))
        reduce(list(parts), flat, op)

    def all_to_all(self, inputs: _Tensors, outputs: _Tensors) -> None:
        messages = self._exchange(inputs, outputs)
        outputs[self._rank].copy_(inputs[self._rank])
        self._wait(*messages)

    def _wait(self, *works: Any) -> None:
        """Raises CollectiveError with gloo's own words."""
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise CollectiveError(
                f"A rank that rank {self._rank} of {self._size} exchanges with is gone, or late; its own error says "
                f"why. gloo says: {error}"
            ) from None

    def barrier(self) -> None:
        self._wait(self._gloo.barrier())

    def set_timeout(self, seconds: float) -> None:
        pass  # whoever has made the gloo group sets it

    def close(self) -> None:
        self._gloo = None


class OnHosts:
    """Ranks on several hosts, with as many on each: through shared memory on each, and gloo between them.

    A rank's shard of what its host holds goes to the ranks of the same local rank on the other hosts: each byte leaves
    a host once, and the shards of a host travel side by side.

    grid: the ranks of each host, in the order of their local ranks.
    """

    def __init__(self, local: Engine, across: AcrossHosts, everybody: Engine, grid: Sequence[Sequence[int]], rank: int):
        self._local, self._across, self._everybody = local, across, everybody
        self._grid, self._rank = grid, rank
        self._hosts, self._locals = len(grid), len(grid[0])
        self._host = next(host for host, ranks in enumerate(grid) if rank in ranks)
        self._local_rank = grid[self._host].index(rank)

    def reduces(self, dtype: torch.dtype, op: str) -> bool:
        return self._local.reduces(dtype, op)

    def all_reduce(self, flat: _Tensor, op: str, root: int = -1) -> None:
        result = flat if root in (-1, self._rank) else flat.clone()
        ranks = self._hosts * self._locals
        whole = flat.numel() // ranks * ranks if size_of(flat) > SHORT_BYTES else 0
        take_turns(self._all_reduce_stages(piece, op) for piece in pieces(result[:whole], ranks))
        if whole < flat.numel():
            self._all_reduce_short(result[whole:], op)

    def _all_reduce_stages(self, flat: _Tensor, op: str) -> Iterator[None]:
        shards = flat.chunk(self._locals)
        mine = shards[self._local_rank]
        self._local.reduce_scatter(shards, mine, _step(flat, op))
        yield from self._across.all_reduce_stages(mine, _step(flat, op))
        self._finish(mine, op)
        self._local.gather(mine, shards)

    def _all_reduce_short(self, flat: _Tensor, op: str) -> None:
        """One rank of each host speaks for it."""
        self._local.all_reduce(flat, _step(flat, op), root=0)
        if self._local_rank == 0:
            self._across.all_reduce(flat, _step(flat, op))
            self._finish(flat, op)
        self._local.broadcast(flat, root=0)

    def _finish(self, flat: _Tensor, op: str) -> None:
        if op != _step(flat, op):
            divide(flat, self._hosts * self._locals)

    def broadcast(self, flat: _Tensor, root: int) -> None:
        host = next(host for host, ranks in enumerate(self._grid) if root in ranks)
        local_rank = self._grid[host].index(root)
        if self._local_rank == local_rank:
            self._across.broadcast(flat, host)
        self._local.broadcast(flat, local_rank)

    def gather(self, flat: _Tensor, outputs: _Tensors, root: int = -1) -> None:
        if root >= 0:
            self._everybody.gather(flat, outputs, root)
            return
        column = torch.empty(self._hosts, flat.numel(), dtype=flat.dtype)
        self._across.gather(flat, list(column))
        for host, ranks in enumerate(self._grid):
            self._local.gather(column[host], [outputs[rank] for rank in ranks])

    def scatter(self, inputs: _Tensors, flat: _Tensor, root: int) -> None:
        self._everybody.scatter(inputs, flat, root)

    def reduce_scatter(self, inputs: _Tensors, flat: _Tensor, op: str) -> None:
        column = torch.empty(self._hosts, flat.numel(), dtype=flat.dtype)
        for host, ranks in enumerate(self._grid):
            self._local.reduce_scatter([inputs[rank] for rank in ranks], column[host], _step(flat, op))
        self._across.reduce_scatter(list(column), flat, _step(flat, op))
        self._finish(flat, op)

    def all_to_all(self, inputs: _Tensors, outputs: _Tensors) -> None:
        self._everybody.all_to_all(inputs, outputs)

    def barrier(self) -> None:
        self._everybody.barrier()

    def set_timeout(self, seconds: float) -> None:
        self._local.set_timeout(seconds)

    def close(self) -> None:
        for engine in (self._local, self._across, self._everybody):
            engine.close()


def pieces(flat: _Tensor, shards: int) -> Sequence[_Tensor]:
    """Cut a tensor, of a multiple of `shards` elements, into pieces of the same kind."""
    length = max(PIECE_BYTES // shards, MESSAGE_BYTES) // flat.element_size()
    return torch.split(flat, length * shards) if flat.numel() else ()


def take_turns(collectives: Iterable[Iterator[None]]) -> None:
    """Run collectives that overlap: at each turn one begins, and those that wait for messages go on, latest first.

    So the network has the messages of the next ones while a rank is busy with those of one; and the order is the same
    on all ranks.
    """
    running: deque[Iterator[None]] = deque()
    for collective in collectives:
        running.appendleft(collective)
        _go_on(running)
    while running:
        _go_on(running)


def _go_on(running: deque[Iterator[None]]) -> None:
    for collective in list(running):
        if next(collective, running) is running:
            running.remove(collective)


def _step(flat: _Tensor, op: str) -> str:
    """The average of the hosts' averages does not overflow where their sums might; integers are divided once."""
    return "sum" if op == "avg" and not flat.is_floating_point() else op


def _addresses(flats: _Tensors) -> list[int]:
    return [flat.data_ptr() for flat in flats]
