"""Collectives of the ranks of one host through memory that they share.

Tensors travel in pieces through two sets of slots, one slot for each rank and one for the result. In a reduction each
rank reduces its shard of the piece, then all copy the whole; below `_SMALL_BYTES` each reduces all of it for itself,
which saves a second meeting. A rank fills one set while others still read the other: nobody can be two pieces ahead.

Sums run in the order of the ranks, in float32 for float16 and bfloat16: all ranks hold the same bits, run for run.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path

import torch
from torch._C._distributed_c10d import Store
from torch.distributed import ReduceOp

from smdistributed.core import segment
from smdistributed.core.meeting import LINE_BYTES, Meeting, is_supported
from smdistributed.core.segment import Process

_SLOT_BYTES = tuple(1 << power for power in range(22, 15, -1))  # the largest that fits: 4 MiB to 64 KiB
_SMALL_BYTES = 32 << 10
_ALIGNED = 64  # elements: shards begin on lines of their own
_NOWHERE = "nowhere"

_Reduce = Callable[[torch.Tensor, torch.Tensor], object]
_IN_PLACE: dict[ReduceOp.RedOpType, _Reduce] = {
    ReduceOp.SUM: torch.Tensor.add_,
    ReduceOp.AVG: torch.Tensor.add_,
    ReduceOp.PRODUCT: torch.Tensor.mul_,
    ReduceOp.MIN: lambda into, other: torch.minimum(into, other, out=into),
    ReduceOp.MAX: lambda into, other: torch.maximum(into, other, out=into),
    ReduceOp.BAND: torch.Tensor.bitwise_and_,
    ReduceOp.BOR: torch.Tensor.bitwise_or_,
    ReduceOp.BXOR: torch.Tensor.bitwise_xor_,
}


class SharedMemory:
    """The ranks of a group that all run on this host."""

    def __init__(self, memory: mmap.mmap, rank: int, processes: Sequence[Process], timeout: timedelta) -> None:
        size = len(processes)
        self._slot_bytes = (len(memory) - LINE_BYTES * size) // (2 * (size + 1))
        self._meeting = Meeting(memory, rank, processes, timeout.total_seconds())
        self._rank, self._size = rank, size
        flat = torch.frombuffer(memory, dtype=torch.uint8)[LINE_BYTES * size :]
        self._sets = flat.view(2, size + 1, self._slot_bytes)
        self._turn = 0

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long ranks wait for each other."""
        self._meeting.seconds = timeout.total_seconds()

    @staticmethod
    def reduces(op: ReduceOp.RedOpType) -> bool:
        """Whether this engine knows a reduction."""
        return op in _IN_PLACE

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp.RedOpType) -> None:
        """Combine `tensor` (any shape, strides and dtype; on the CPU) over the ranks, in place."""
        with _Flat(tensor) as flat:
            for piece in self._pieces(flat):
                self._all_reduce(piece, op)

    def _all_reduce(self, piece: torch.Tensor, op: ReduceOp.RedOpType) -> None:
        slots = self._slots(piece)
        slots[self._rank].copy_(piece)
        self._meeting.wait()
        if piece.nbytes <= _SMALL_BYTES:
            self._reduce(slots[:-1], piece, op)
            return
        low, high = self._shard(piece.numel())
        self._reduce([slot[low:high] for slot in slots[:-1]], slots[-1][low:high], op)
        self._meeting.wait()
        piece.copy_(slots[-1])

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Copy rank `root`'s tensor into that of every rank."""
        with _Flat(tensor) as flat:
            for piece in self._pieces(flat):
                result = self._slots(piece)[-1]
                if self._rank == root:
                    result.copy_(piece)
                self._meeting.wait()
                if self._rank != root:
                    piece.copy_(result)

    def all_gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> None:
        """Copy every rank's `tensor` into that of `outputs` which has its number; all of one shape and dtype."""
        flat = tensor.reshape(-1)
        gathered = [_Flat(output) for output in outputs]
        for low, high in _ranges(flat.numel(), self._slot_bytes // flat.element_size()):
            slots = self._slots(flat[low:high])
            slots[self._rank].copy_(flat[low:high])
            self._meeting.wait()
            for output, slot in zip(gathered, slots):
                output.flat[low:high].copy_(slot)
        for output in gathered:
            output.give_back()

    def reduce_scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: ReduceOp.RedOpType) -> None:
        """Combine, over the ranks, that of `inputs` which has this rank's number into `output`."""
        flats = [tensor.reshape(-1) for tensor in inputs]
        with _Flat(output) as flat:
            most = self._slot_bytes // flat.element_size() // self._size
            for low, high in _ranges(flat.numel(), most):
                count = high - low
                slots = self._slots(flat[low:high], times=self._size)
                for rank, tensor in enumerate(flats):
                    slots[self._rank][rank * count : (rank + 1) * count].copy_(tensor[low:high])
                self._meeting.wait()
                mine = slice(self._rank * count, (self._rank + 1) * count)
                self._reduce([slot[mine] for slot in slots[:-1]], flat[low:high], op)

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self._meeting.wait()

    def _pieces(self, flat: torch.Tensor) -> Iterator[torch.Tensor]:
        return (flat[low:high] for low, high in _ranges(flat.numel(), self._slot_bytes // flat.element_size()))

    def _slots(self, piece: torch.Tensor, times: int = 1) -> list[torch.Tensor]:
        """Return the next set: a view of each rank's slot, and of the result, with the elements of a piece."""
        self._turn ^= 1
        count = piece.numel() * times
        return list(self._sets[self._turn, :, : count * piece.element_size()].view(piece.dtype))

    def _shard(self, count: int) -> tuple[int, int]:
        """Return which elements this rank reduces."""
        each = -(-count // (self._size * _ALIGNED)) * _ALIGNED
        return min(count, each * self._rank), min(count, each * (self._rank + 1))

    def _reduce(self, parts: Sequence[torch.Tensor], result: torch.Tensor, op: ReduceOp.RedOpType) -> None:
        wide = result.dtype in (torch.float16, torch.bfloat16)
        total = parts[0].float() if wide else result.copy_(parts[0])
        for part in parts[1:]:
            _IN_PLACE[op](total, part.to(total.dtype))
        if op == ReduceOp.AVG:
            total.div_(self._size)
        if wide:
            result.copy_(total)


def open_shared_memory(store: Store, rank: int, size: int, timeout: timedelta) -> SharedMemory | str:
    """Return the shared memory of a group's ranks, or why they have none; the same of the two on all of them.

    `store`: of this group alone.
    """
    processes = [
        Process(*json.loads(text))
        for text in _exchanged(store, "process", rank, size, json.dumps(segment.this_process()))
    ]
    memory, problem = _map(store, rank, processes)
    problems = _exchanged(store, "problem", rank, size, problem)
    if rank == 0 and memory is not None:
        Path(store.get("path").decode()).unlink()  # all have tried to map it by now
    found = [f"rank {other}: {text}" for other, text in enumerate(problems) if text]
    if found or memory is None:
        return "; ".join(found)
    return SharedMemory(memory, rank, processes, timeout)


def _exchanged(store: Store, name: str, rank: int, size: int, text: str) -> list[str]:
    """Tell the others something, and return what each has told."""
    store.set(f"{name}-{rank}", text)
    return [store.get(f"{name}-{other}").decode() for other in range(size)]


def _map(store: Store, rank: int, processes: Sequence[Process]) -> tuple[mmap.mmap | None, str]:
    """Map the file that rank 0 makes; returns that, or why not."""
    try:
        if rank == 0:
            return _make(store, len(processes)), ""
        path = store.get("path").decode()
        if path == _NOWHERE:
            return None, "rank 0 has made none"
        if processes[0].host != processes[rank].host:
            return None, "it runs on another host than rank 0"
        return segment.attach(Path(path)), ""
    except OSError as error:
        return None, str(error)


def _make(store: Store, size: int) -> mmap.mmap:
    lengths = [LINE_BYTES * size + 2 * (size + 1) * slot for slot in _SLOT_BYTES]
    try:
        if not is_supported():
            raise OSError(f"{os.uname().sysname} on {os.uname().machine} is not supported")
        path, memory = segment.create(
            next((length for length in lengths if length <= segment.room() // 2), lengths[-1])
        )
    except OSError:
        store.set("path", _NOWHERE)
        raise
    store.set("path", str(path))
    return memory


class _Flat:
    """A tensor as one contiguous dimension; what is written into it is in the tensor after `give_back`."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor.detach()
        self.flat = self._tensor.reshape(-1)

    def give_back(self) -> None:
        if self.flat.numel() and self.flat.data_ptr() != self._tensor.data_ptr():
            self._tensor.copy_(self.flat.view(self._tensor.shape))

    def __enter__(self) -> torch.Tensor:
        return self.flat

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.give_back()


def _ranges(count: int, most: int) -> Iterator[tuple[int, int]]:
    """Cut `count` elements into pieces of at most `most`; (first, last + 1)."""
    return ((low, min(count, low + most)) for low in range(0, count, most))
