"""The engines: how the ranks of a group exchange flat tensors, whatever framework holds them (see `flat`).

`ShmEngine` goes through shared memory, `NetworkEngine` through messages of a `Transport`, such as MPI, and `HierarchicalEngine` through
both, so that each byte leaves a host once; `MonitoredEngine` stands before the latter two. All have the same methods, `Engine`;
`root` -1 means all ranks. Whoever calls keeps the memory of the tensors until the call has ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from smdistributed.core import native, reductions
from smdistributed.core.flat import Flat, temporary
from smdistributed.core.diagnostics import CollectiveError, UnexplainedError
from smdistributed.core.reductions import Reductions
from smdistributed.core.shared_memory import SharedMemory
from smdistributed.core.watch import Watch

_Flats = Sequence[Flat]
SHORT_BYTES = 32 << 10  # below, a message more costs more than a byte more
PIECE_BYTES = 4 << 20  # of all_reduce: the first and the last piece overlap with nothing
MESSAGE_BYTES = 64 << 10  # at least, where the ranks are so many that their shards of a piece are short


class Request(Protocol):
    """A message on its way, or a barrier."""

    def wait(self) -> object:
        """Wait until its memory may be used. Raises RuntimeError when it takes too long or fails."""


class Transport(Protocol):
    """Moves messages between ranks, which it counts for itself. A message keeps the owner of its memory."""

    def send(self, message: Flat, rank: int, tag: int) -> Request:
        """Start to send a message; what waits for it has the same tag and size."""

    def recv(self, message: Flat, rank: int, tag: int) -> Request:
        """Start to receive a message."""

    def barrier(self) -> Request:
        """Start to wait until every rank is here."""

    def set_timeout(self, seconds: float) -> None:
        """Set how long a message may take."""


class Engine(Protocol):
    """Collectives of flat tensors; every method is called by all ranks of the group, in the same order."""

    def reduces(self, dtype: str, op: str) -> bool:
        """Whether there is such a reduction of such elements."""

    def all_reduce(self, flat: Flat, op: str, root: int = -1, source: Flat | None = None) -> None:
        """Combine `flat` over the ranks, in place; elsewhere than on the root it is left as it was.

        source: where this rank's elements are, if not in `flat`; then what is in `flat` elsewhere is left to chance.
        """

    def broadcast(self, flat: Flat, root: int) -> None:
        """Copy the root's into that of every rank."""

    def gather(self, flat: Flat, outputs: _Flats, root: int = -1) -> None:
        """Copy every rank's `flat` into that of `outputs` which has its number."""

    def scatter(self, inputs: _Flats, flat: Flat, root: int) -> None:
        """Copy that of the root's `inputs` which has a rank's number into that rank's `flat`."""

    def reduce_scatter(self, inputs: _Flats, flat: Flat, op: str) -> None:
        """Combine, over the ranks, that of `inputs` which has this rank's number into `flat`."""

    def all_to_all(self, inputs: _Flats, outputs: _Flats) -> None:
        """Copy each of `inputs` to the rank of that number, and what that gives into `outputs`; sizes may differ."""

    def barrier(self) -> None:
        """Wait until every rank is here."""

    def set_timeout(self, seconds: float) -> None:
        """Set how long ranks wait for each other."""

    def give_up(self, reason: str) -> None:
        """Tell the other ranks of this host, where the engine can, that this one goes no further."""

    def close(self) -> None:
        """Give up what the engine holds."""


class ShmEngine:
    """The ranks of one host, through memory that they share."""

    def __init__(self, shared: SharedMemory) -> None:
        self._shared = shared

    def reduces(self, dtype: str, op: str) -> bool:
        return reductions.reduces(dtype, op)

    def all_reduce(self, flat: Flat, op: str, root: int = -1, source: Flat | None = None) -> None:
        self._shared.all_reduce(flat.address, flat.count, flat.dtype, op, root, source.address if source else 0)

    def broadcast(self, flat: Flat, root: int) -> None:
        self._shared.broadcast(flat.address, flat.bytes, root)

    def gather(self, flat: Flat, outputs: _Flats, root: int = -1) -> None:
        self._shared.gather(flat.address, _addresses(outputs), flat.bytes, root)

    def scatter(self, inputs: _Flats, flat: Flat, root: int) -> None:
        self._shared.scatter(_addresses(inputs), flat.address, flat.bytes, root)

    def reduce_scatter(self, inputs: _Flats, flat: Flat, op: str) -> None:
        self._shared.reduce_scatter(_addresses(inputs), flat.address, flat.count, flat.dtype, op)

    def all_to_all(self, inputs: _Flats, outputs: _Flats) -> None:
        self._shared.all_to_all(
            *(_addresses(inputs), [flat.bytes for flat in inputs]),
            *(_addresses(outputs), [flat.bytes for flat in outputs]),
        )

    def barrier(self) -> None:
        self._shared.barrier()

    def set_timeout(self, seconds: float) -> None:
        self._shared.seconds = seconds

    def give_up(self, reason: str) -> None:
        self._shared.give_up(reason)

    def close(self) -> None:
        self._shared.close()


class NetworkEngine:
    """Ranks anywhere, through messages. What is reduced is reduced here, in the order of the ranks.

    gloo reduces few dtypes, knows no average, and its order of summation follows its ring; and it ends the process
    where ranks that have come apart give its collectives different sizes. Messages of different tags just wait.

    tag: of a message of so many bytes, and of the collective that runs. reductions: how this rank reduces.
    """

    def __init__(
        self, transport: Transport, rank: int, size: int, tag: Callable[[int], int], reductions: Reductions = reductions
    ) -> None:
        self._transport, self._rank, self._size, self._tag = transport, rank, size, tag
        self._reduces, self._reduce = reductions.reduces, reductions.reduce

    def reduces(self, dtype: str, op: str) -> bool:
        return self._reduces(dtype, op)

    def all_reduce(self, flat: Flat, op: str, root: int = -1, source: Flat | None = None) -> None:
        if source:
            flat.copy_from(source)
        whole = flat.count // self._size * self._size if flat.bytes > SHORT_BYTES else 0
        result = flat if root in (-1, self._rank) else flat.clone()
        take_turns(self.all_reduce_stages(piece, op) for piece in pieces(result.cut(0, whole), self._size))
        if whole < flat.count:
            rest = flat.cut(whole, flat.count)
            parts = temporary(self._size * rest.count, flat.dtype).chunk(self._size)
            self.gather(rest, parts)
            self._reduce(parts, result.cut(whole, flat.count), op)

    def all_reduce_stages(self, flat: Flat, op: str) -> Iterator[None]:
        """Combine `flat` over the ranks, in place; yields when there is nothing to do until messages have come.

        The number of elements must be a multiple of that of the ranks.
        """
        shards = flat.chunk(self._size)
        mine = shards[self._rank]
        parts = temporary(flat.count, flat.dtype).chunk(self._size)
        parts[self._rank] = mine
        messages = self._exchange(shards, parts)
        yield
        self._wait(*messages)
        self._reduce(parts, mine, op)
        messages = self._exchange([mine] * self._size, shards)
        yield
        self._wait(*messages)

    def _exchange(self, inputs: _Flats, outputs: _Flats) -> list[Request]:
        """Start to send to each other rank what has its number, and to receive from it, where that is not empty.

        Straight from and into their memory: gloo's own all_to_all wants them in one piece, which is two copies more.
        """
        others = [rank for rank in range(self._size) if rank != self._rank]
        received, sent = ({rank: flats[rank].as_bytes() for rank in others} for flats in (outputs, inputs))
        return [
            *(self._recv(flat, rank) for rank, flat in received.items() if flat.count),
            *(self._send(flat, rank) for rank, flat in sent.items() if flat.count),
        ]

    def _send(self, message: Flat, rank: int) -> Request:
        return self._transport.send(message, rank, self._tag(message.count))

    def _recv(self, message: Flat, rank: int) -> Request:
        return self._transport.recv(message, rank, self._tag(message.count))

    def broadcast(self, flat: Flat, root: int) -> None:
        """A tree: who has it passes it on, and so twice as many have it after each round."""
        if not flat.count:
            return
        message, place, having = flat.as_bytes(), (self._rank - root) % self._size, 1
        while having < self._size:
            if place < having and place + having < self._size:
                self._wait(self._send(message, (self._rank + having) % self._size))
            elif having <= place < 2 * having:
                self._wait(self._recv(message, (self._rank - having) % self._size))
            having *= 2

    def gather(self, flat: Flat, outputs: _Flats, root: int = -1) -> None:
        if root in (-1, self._rank):
            outputs[self._rank].copy_from(flat)
        if root < 0:
            self._wait(*self._exchange([flat] * self._size, outputs))
        elif flat.count:
            others = [rank for rank in range(self._size) if rank != root]
            self._wait(
                *([self._recv(outputs[rank].as_bytes(), rank) for rank in others] if root == self._rank else []),
                *([] if root == self._rank else [self._send(flat.as_bytes(), root)]),
            )

    def scatter(self, inputs: _Flats, flat: Flat, root: int) -> None:
        if root != self._rank:
            self._wait(*([self._recv(flat.as_bytes(), root)] if flat.count else []))
            return
        flat.copy_from(inputs[root])
        others = [rank for rank in range(self._size) if rank != root]
        self._wait(*(self._send(inputs[rank].as_bytes(), rank) for rank in others if flat.count))

    def reduce_scatter(self, inputs: _Flats, flat: Flat, op: str) -> None:
        parts = temporary(self._size * flat.count, flat.dtype).chunk(self._size)
        self.all_to_all(inputs, parts)
        self._reduce(parts, flat, op)

    def all_to_all(self, inputs: _Flats, outputs: _Flats) -> None:
        messages = self._exchange(inputs, outputs)
        outputs[self._rank].copy_from(inputs[self._rank])
        self._wait(*messages)

    def _wait(self, *requests: Request) -> None:
        """Raises UnexplainedError with the words of gloo or MPI."""
        try:
            for request in requests:
                request.wait()
        except RuntimeError as error:
            raise UnexplainedError(f"What moves the messages says: {error}") from None

    def barrier(self) -> None:
        """Theirs: it takes half the time of one by messages, and has no sizes to differ."""
        self._wait(self._transport.barrier())

    def set_timeout(self, seconds: float) -> None:
        self._transport.set_timeout(seconds)

    def give_up(self, reason: str) -> None:
        """Who waits for this rank hears of it through the store (`MonitoredEngine`)."""

    def close(self) -> None:
        self._transport = None  # type: ignore[assignment]  # its threads end with it


class HierarchicalEngine:
    """Ranks on several hosts, with as many on each: through shared memory on each, messages between them.

    A rank's shard of what its host holds goes to the ranks of the same local rank on the other hosts: each byte leaves
    a host once, and the shards of a host travel side by side.

    grid: the ranks of each host, in the order of their local ranks.
    """

    def __init__(self, local: Engine, across: NetworkEngine, everybody: Engine, grid: Sequence[Sequence[int]], rank: int):
        self._local, self._across, self._everybody = local, across, everybody
        self._grid, self._rank = grid, rank
        self._hosts, self._locals = len(grid), len(grid[0])
        self._host = next(host for host, ranks in enumerate(grid) if rank in ranks)
        self._local_rank = grid[self._host].index(rank)

    def reduces(self, dtype: str, op: str) -> bool:
        return self._local.reduces(dtype, op)

    def all_reduce(self, flat: Flat, op: str, root: int = -1, source: Flat | None = None) -> None:
        if source:
            flat.copy_from(source)
        result = flat if root in (-1, self._rank) else flat.clone()
        ranks = self._hosts * self._locals
        whole = flat.count // ranks * ranks if flat.bytes > SHORT_BYTES else 0
        take_turns(self._all_reduce_stages(piece, op) for piece in pieces(result.cut(0, whole), ranks))
        if whole < flat.count:
            self._all_reduce_short(result.cut(whole, flat.count), op)

    def _all_reduce_stages(self, flat: Flat, op: str) -> Iterator[None]:
        shards = flat.chunk(self._locals)
        mine = shards[self._local_rank]
        self._local.reduce_scatter(shards, mine, _step(flat, op))
        yield from self._across.all_reduce_stages(mine, _step(flat, op))
        self._finish(mine, op)
        self._local.gather(mine, shards)

    def _all_reduce_short(self, flat: Flat, op: str) -> None:
        """One rank of each host speaks for it."""
        self._local.all_reduce(flat, _step(flat, op), root=0)
        if self._local_rank == 0:
            self._across.all_reduce(flat, _step(flat, op))
            self._finish(flat, op)
        self._local.broadcast(flat, root=0)

    def _finish(self, flat: Flat, op: str) -> None:
        if op != _step(flat, op):
            reductions.divide(flat, self._hosts * self._locals)

    def broadcast(self, flat: Flat, root: int) -> None:
        host = next(host for host, ranks in enumerate(self._grid) if root in ranks)
        local_rank = self._grid[host].index(root)
        if self._local_rank == local_rank:
            self._across.broadcast(flat, host)
        self._local.broadcast(flat, local_rank)

    def gather(self, flat: Flat, outputs: _Flats, root: int = -1) -> None:
        if root >= 0:
            self._everybody.gather(flat, outputs, root)
            return
        column = temporary(self._hosts * flat.count, flat.dtype).chunk(self._hosts)
        self._across.gather(flat, column)
        for host, ranks in enumerate(self._grid):
            self._local.gather(column[host], [outputs[rank] for rank in ranks])

    def scatter(self, inputs: _Flats, flat: Flat, root: int) -> None:
        self._everybody.scatter(inputs, flat, root)

    def reduce_scatter(self, inputs: _Flats, flat: Flat, op: str) -> None:
        column = temporary(self._hosts * flat.count, flat.dtype).chunk(self._hosts)
        for host, ranks in enumerate(self._grid):
            self._local.reduce_scatter([inputs[rank] for rank in ranks], column[host], _step(flat, op))
        self._across.reduce_scatter(column, flat, _step(flat, op))
        self._finish(flat, op)

    def all_to_all(self, inputs: _Flats, outputs: _Flats) -> None:
        self._everybody.all_to_all(inputs, outputs)

    def barrier(self) -> None:
        self._everybody.barrier()

    def set_timeout(self, seconds: float) -> None:
        for engine in (self._local, self._across, self._everybody):
            engine.set_timeout(seconds)

    def give_up(self, reason: str) -> None:
        self._local.give_up(reason)

    def close(self) -> None:
        for engine in (self._local, self._across, self._everybody):
            engine.close()


class MonitoredEngine:
    """An engine of ranks on several hosts; a `Watch` knows what it does, and finds out why that does not end."""

    def __init__(self, engine: Engine, watch: Watch) -> None:
        self._engine, self.watch = engine, watch

    def reduces(self, dtype: str, op: str) -> bool:
        return self._engine.reduces(dtype, op)

    def all_reduce(self, flat: Flat, op: str, root: int = -1, source: Flat | None = None) -> None:
        with self._monitored("all_reduce" if root < 0 else "reduce", flat, op, root):
            self._engine.all_reduce(flat, op, root, source)

    def broadcast(self, flat: Flat, root: int) -> None:
        with self._monitored("broadcast", flat, root=root):
            self._engine.broadcast(flat, root)

    def gather(self, flat: Flat, outputs: _Flats, root: int = -1) -> None:
        with self._monitored("gather", flat, root=root):
            self._engine.gather(flat, outputs, root)

    def scatter(self, inputs: _Flats, flat: Flat, root: int) -> None:
        with self._monitored("scatter", flat, root=root):
            self._engine.scatter(inputs, flat, root)

    def reduce_scatter(self, inputs: _Flats, flat: Flat, op: str) -> None:
        with self._monitored("reduce_scatter", flat, op):
            self._engine.reduce_scatter(inputs, flat, op)

    def all_to_all(self, inputs: _Flats, outputs: _Flats) -> None:
        size = sum(flat.bytes for flat in inputs)
        self.watch.begin("all_to_all", size=size, same=False)  # each rank may give other sizes
        with _Monitoring(self):
            self._engine.all_to_all(inputs, outputs)

    def barrier(self) -> None:
        self.watch.begin("barrier")
        with _Monitoring(self):
            self._engine.barrier()

    def _monitored(self, name: str, flat: Flat, op: str = "", root: int = -1) -> _Monitoring:
        self.watch.begin(name, flat.dtype if op else "", op, root, flat.bytes)
        return _Monitoring(self)

    def set_timeout(self, seconds: float) -> None:
        self.watch.seconds = seconds
        self._engine.set_timeout(seconds)

    def give_up(self, reason: str) -> None:
        self._engine.give_up(reason)

    def close(self) -> None:
        self.watch.close()
        self._engine.close()


class _Monitoring(AbstractContextManager):  # type: ignore[type-arg]
    """A collective that has begun."""

    __slots__ = ("_engine",)

    def __init__(self, engine: MonitoredEngine) -> None:
        self._engine = engine

    def __exit__(self, kind: object, error: BaseException | None, at: object) -> None:
        watch = self._engine.watch
        try:
            if isinstance(error, CollectiveError):
                reason = watch.explain(error)
                self._engine.give_up(reason)
                raise CollectiveError(reason) from None
        finally:
            watch.end()


def pieces(flat: Flat, shards: int) -> Sequence[Flat]:
    """Cut a tensor, of a multiple of `shards` elements, into pieces of the same kind."""
    length = max(PIECE_BYTES // shards, MESSAGE_BYTES) // native.ITEM_BYTES[flat.dtype]
    return flat.split(length * shards)


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


def _step(flat: Flat, op: str) -> str:
    """The average of the hosts' averages does not overflow where their sums might; integers are divided once."""
    return "sum" if op == "avg" and flat.dtype not in native.FLOATS else op


def _addresses(flats: _Flats) -> list[int]:
    return [flat.address for flat in flats]
