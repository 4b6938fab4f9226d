"""The communication engines of ranks on several hosts: messages, with or without shared memory.

Long reductions run in pieces that overlap. `MonitoredEngine` lets a `GroupMonitor` watch the collectives of either.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager

from smdistributed.core import native
from smdistributed.core.diagnostics import CollectiveError, UnexplainedError
from smdistributed.core.engines import Engine, Flats, Request, TensorTransport
from smdistributed.core.flat import Flat, allocate, compress, decompress, divide, reduce
from smdistributed.core.group_monitor import GroupMonitor

SHORT_BYTES = 32 << 10  # below, another message costs more than another byte
PIECE_BYTES = 4 << 20  # of an all_reduce: the first and the last piece overlap with nothing
MESSAGE_BYTES = 64 << 10  # the least, if many ranks share a piece


class _Unexplained:
    """Turns errors of gloo or MPI into UnexplainedError. contextlib's managers would take several times as long."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, RuntimeError):
            raise UnexplainedError(f"Transport (gloo or MPI) failed: {error}") from None


class NetworkEngine(Engine):
    """Collectives through messages between ranks anywhere. Each rank reduces its own shard, in rank order.

    gloo's collectives are not used: they reduce few dtypes, know no average, and add up in the order of a ring. They
    also end the process if ranks call them with different sizes. Messages with different tags just wait. `tag` returns
    the tag of a message of that many bytes in the collective that runs.
    """

    def __init__(self, transport: TensorTransport, rank: int, size: int, tag: Callable[[int], int]) -> None:
        self._transport, self._rank, self._size, self._tag = transport, rank, size, tag

    def all_reduce(self, flat: Flat, op: str, root: int = -1, source: Flat | None = None) -> None:
        """Reduces in place. Long tensors go around in pieces; every rank gets short ones, and a rest, whole."""
        if source:
            flat.copy_from(source)
        whole = flat.count // self._size * self._size if flat.bytes > SHORT_BYTES else 0
        result = flat if root in (-1, self._rank) else flat.clone()
        interleave(self.all_reduce_stages(piece, op) for piece in cut_pieces(result.cut(0, whole), self._size))
        if whole < flat.count:
            rest = flat.cut(whole, flat.count)
            parts = allocate(self._size * rest.count, flat.dtype).chunk(self._size)
            self.gather(rest, parts)
            reduce(parts, result.cut(whole, flat.count), op)

    def all_reduce_stages(self, flat: Flat, op: str) -> Iterator[None]:
        """Combines `flat`, which the ranks divide evenly, in place; yields whenever it waits for messages."""
        shards = flat.chunk(self._size)
        mine = shards[self._rank]
        parts = allocate(flat.count, flat.dtype).chunk(self._size)
        parts[self._rank] = mine
        messages = self._start_exchange(shards, parts)
        yield
        self._wait(*messages)
        reduce(parts, mine, op)
        messages = self._start_exchange([mine] * self._size, shards)
        yield
        self._wait(*messages)

    def all_reduce_int8(self, flat: Flat, op: str, lost: Flat) -> None:
        """Reduces in place, in pieces. A short rest, or a short tensor, is not compressed."""
        whole = flat.count // self._size * self._size if flat.bytes > SHORT_BYTES else 0
        pieces = zip(cut_pieces(flat.cut(0, whole), self._size), cut_pieces(lost.cut(0, whole), self._size))
        interleave(self.int8_stages(piece, op, rest) for piece, rest in pieces)
        if whole < flat.count:
            self.all_reduce(flat.cut(whole, flat.count), op)

    def int8_stages(self, flat: Flat, op: str, lost: Flat) -> Iterator[None]:
        """Combines `flat` as `all_reduce_stages` does, from compressed shards, and compresses the result again.

        This rank's own shard is not rounded on its way here. So its part of `lost` has the loss of the result.
        """
        shards, losses = flat.chunk(self._size), lost.chunk(self._size)
        mine, me = shards[self._rank], self._rank
        sent = [mine if rank == me else compress(shard, losses[rank]) for rank, shard in enumerate(shards)]
        parts = [allocate(message.count, "uint8") for message in sent]
        messages = self._start_exchange(sent, parts)
        yield
        self._wait(*messages)
        for rank, part in enumerate(parts):
            if rank != me:
                decompress(part, mine, add=True)
        if op == "avg":
            divide(mine, self._size)
        parts[me] = compress(mine, losses[me])
        messages = self._start_exchange([parts[me]] * self._size, parts)
        yield
        self._wait(*messages)
        for part, shard in zip(parts, shards):
            decompress(part, shard)

    def _start_exchange(self, inputs: Flats, outputs: Flats) -> list[Request]:
        """Starts to exchange parts, unless empty. gloo's own all_to_all needs contiguous tensors: two copies more."""
        others = [rank for rank in range(self._size) if rank != self._rank]
        received, sent = ({rank: flats[rank].as_bytes() for rank in others} for flats in (outputs, inputs))
        return [
            *(self._recv(flat, rank) for rank, flat in received.items() if flat.count),
            *(self._send(flat, rank) for rank, flat in sent.items() if flat.count),
        ]

    def _send(self, message: Flat, rank: int) -> Request:
        with _Unexplained():
            return self._transport.send(message, rank, self._tag(message.count))

    def _recv(self, message: Flat, rank: int) -> Request:
        with _Unexplained():
            return self._transport.recv(message, rank, self._tag(message.count))

    def broadcast(self, flat: Flat, root: int) -> None:
        """Sends along a tree: the number of ranks that have the elements doubles in each round."""
        if not flat.count:
            return
        message, distance, having = flat.as_bytes(), (self._rank - root) % self._size, 1
        while having < self._size:
            if distance < having and distance + having < self._size:
                self._wait(self._send(message, (self._rank + having) % self._size))
            elif having <= distance < 2 * having:
                self._wait(self._recv(message, (self._rank - having) % self._size))
            having *= 2

    def gather(self, flat: Flat, outputs: Flats, root: int = -1) -> None:
        if root in (-1, self._rank):
            outputs[self._rank].copy_from(flat)
        if root < 0:
            self._wait(*self._start_exchange([flat] * self._size, outputs))
        elif flat.count and root == self._rank:
            others = [rank for rank in range(self._size) if rank != root]
            self._wait(*[self._recv(outputs[rank].as_bytes(), rank) for rank in others])
        elif flat.count:
            self._wait(self._send(flat.as_bytes(), root))

    def scatter(self, inputs: Flats, flat: Flat, root: int) -> None:
        if root != self._rank:
            self._wait(*([self._recv(flat.as_bytes(), root)] if flat.count else []))
            return
        flat.copy_from(inputs[root])
        others = [rank for rank in range(self._size) if rank != root]
        self._wait(*(self._send(inputs[rank].as_bytes(), rank) for rank in others if flat.count))

    def reduce_scatter(self, inputs: Flats, flat: Flat, op: str) -> None:
        parts = allocate(self._size * flat.count, flat.dtype).chunk(self._size)
        self.all_to_all(inputs, parts)
        reduce(parts, flat, op)

    def all_to_all(self, inputs: Flats, outputs: Flats) -> None:
        messages = self._start_exchange(inputs, outputs)
        outputs[self._rank].copy_from(inputs[self._rank])
        self._wait(*messages)

    def _wait(self, *requests: Request) -> None:
        with _Unexplained():
            for request in requests:
                request.wait()

    def barrier(self) -> None:
        """Uses the transport's barrier: it takes half the time of one by messages, and has no sizes to differ."""
        with _Unexplained():
            self._transport.barrier().wait()

    def set_timeout(self, seconds: float) -> None:
        self._transport.set_timeout(seconds)

    def abort(self, reason: str) -> None:
        """Does nothing: `MonitoredEngine` tells the other ranks through the store."""

    def close(self) -> None:
        self._transport = None  # type: ignore[assignment]  # its threads end with it


class HierarchicalEngine(Engine):
    """Collectives of several hosts with equally many ranks: shared memory on each host, messages between hosts.

    A rank exchanges its shard of its host's data with the ranks of the same local rank on the other hosts. So each byte
    leaves a host once, and the shards of a host travel in parallel. `across` is for those ranks. `grid` has the ranks
    of each host, in the order of their local ranks.
    """

    def __init__(
        self, local: Engine, across: NetworkEngine, everybody: Engine, grid: Sequence[Sequence[int]], rank: int
    ):
        self._local, self._across, self._everybody = local, across, everybody
        self._grid, self._rank = grid, rank
        self._hosts, self._locals = len(grid), len(grid[0])
        self._host = next(host for host, ranks in enumerate(grid) if rank in ranks)
        self._local_rank = grid[self._host].index(rank)

    def all_reduce(self, flat: Flat, op: str, root: int = -1, source: Flat | None = None) -> None:
        """Reduces within each host and across hosts. A rest that can't be divided by the ranks is reduced apart."""
        if source:
            flat.copy_from(source)
        result = flat if root in (-1, self._rank) else flat.clone()
        ranks = self._hosts * self._locals
        whole = flat.count // ranks * ranks if flat.bytes > SHORT_BYTES else 0
        interleave(self._all_reduce_stages(piece, op) for piece in cut_pieces(result.cut(0, whole), ranks))
        if whole < flat.count:
            self._all_reduce_short(result.cut(whole, flat.count), op)

    def all_reduce_int8(self, flat: Flat, op: str, lost: Flat) -> None:
        """Reduces in place. Each rank compresses its shard of its host's data, and uses this part of `lost`."""
        ranks = self._hosts * self._locals
        whole = flat.count // ranks * ranks if flat.bytes > SHORT_BYTES else 0
        pieces = zip(cut_pieces(flat.cut(0, whole), ranks), cut_pieces(lost.cut(0, whole), ranks))
        interleave(self._all_reduce_stages(piece, op, rest) for piece, rest in pieces)
        if whole < flat.count:
            self._all_reduce_short(flat.cut(whole, flat.count), op)

    def _all_reduce_stages(self, flat: Flat, op: str, lost: Flat | None = None) -> Iterator[None]:
        """Reduces a piece in place, inside hosts and between them; yields whenever it waits for messages.

        With `lost`, what goes between hosts is compressed.
        """
        shards = flat.chunk(self._locals)
        mine = shards[self._local_rank]
        self._local.reduce_scatter(shards, mine, _partial_op(flat, op))
        if lost is None:
            yield from self._across.all_reduce_stages(mine, _partial_op(flat, op))
        else:
            yield from self._across.int8_stages(mine, _partial_op(flat, op), lost.chunk(self._locals)[self._local_rank])
        self._finish(mine, op)
        self._local.gather(mine, shards)

    def _all_reduce_short(self, flat: Flat, op: str) -> None:
        """Reduces a short tensor over all ranks, in place: one rank of each host takes part for its host."""
        self._local.all_reduce(flat, _partial_op(flat, op), root=0)
        if self._local_rank == 0:
            self._across.all_reduce(flat, _partial_op(flat, op))
            self._finish(flat, op)
        self._local.broadcast(flat, root=0)

    def _finish(self, flat: Flat, op: str) -> None:
        """Divides by the number of ranks, in place, if an average was computed as a sum (see `_partial_op`)."""
        if op != _partial_op(flat, op):
            divide(flat, self._hosts * self._locals)

    def broadcast(self, flat: Flat, root: int) -> None:
        """Sends the root's elements across hosts between ranks with its local rank, then within each host."""
        host = next(host for host, ranks in enumerate(self._grid) if root in ranks)
        local_rank = self._grid[host].index(root)
        if self._local_rank == local_rank:
            self._across.broadcast(flat, host)
        self._local.broadcast(flat, local_rank)

    def gather(self, flat: Flat, outputs: Flats, root: int = -1) -> None:
        """Gathers across hosts, then within each host. With a root, all ranks send to it directly."""
        if root >= 0:
            self._everybody.gather(flat, outputs, root)
            return
        column = allocate(self._hosts * flat.count, flat.dtype).chunk(self._hosts)
        self._across.gather(flat, column)
        for host, ranks in enumerate(self._grid):
            self._local.gather(column[host], [outputs[rank] for rank in ranks])

    def scatter(self, inputs: Flats, flat: Flat, root: int) -> None:
        self._everybody.scatter(inputs, flat, root)

    def reduce_scatter(self, inputs: Flats, flat: Flat, op: str) -> None:
        """Reduces within each host the parts of each host's ranks, then across hosts this rank's part, to `flat`."""
        column = allocate(self._hosts * flat.count, flat.dtype).chunk(self._hosts)
        for host, ranks in enumerate(self._grid):
            self._local.reduce_scatter([inputs[rank] for rank in ranks], column[host], _partial_op(flat, op))
        self._across.reduce_scatter(column, flat, _partial_op(flat, op))
        self._finish(flat, op)

    def all_to_all(self, inputs: Flats, outputs: Flats) -> None:
        self._everybody.all_to_all(inputs, outputs)

    def barrier(self) -> None:
        self._everybody.barrier()

    def set_timeout(self, seconds: float) -> None:
        for engine in (self._local, self._across, self._everybody):
            engine.set_timeout(seconds)

    def abort(self, reason: str) -> None:
        self._local.abort(reason)

    def close(self) -> None:
        for engine in (self._local, self._across, self._everybody):
            engine.close()


class MonitoredEngine(Engine):
    """Wraps a communication engine: a `GroupMonitor` tracks its collectives and explains why one does not end."""

    def __init__(self, engine: Engine, monitor: GroupMonitor) -> None:
        self._engine, self.monitor = engine, monitor

    def all_reduce(self, flat: Flat, op: str, root: int = -1, source: Flat | None = None) -> None:
        with self._monitored("all_reduce" if root < 0 else "reduce", flat, op, root):
            self._engine.all_reduce(flat, op, root, source)

    def all_reduce_int8(self, flat: Flat, op: str, lost: Flat) -> None:
        with self._monitored("all_reduce", flat, f"{op} in int8"):
            self._engine.all_reduce_int8(flat, op, lost)

    def broadcast(self, flat: Flat, root: int) -> None:
        with self._monitored("broadcast", flat, root=root):
            self._engine.broadcast(flat, root)

    def gather(self, flat: Flat, outputs: Flats, root: int = -1) -> None:
        with self._monitored("gather", flat, root=root):
            self._engine.gather(flat, outputs, root)

    def scatter(self, inputs: Flats, flat: Flat, root: int) -> None:
        with self._monitored("scatter", flat, root=root):
            self._engine.scatter(inputs, flat, root)

    def reduce_scatter(self, inputs: Flats, flat: Flat, op: str) -> None:
        with self._monitored("reduce_scatter", flat, op):
            self._engine.reduce_scatter(inputs, flat, op)

    def all_to_all(self, inputs: Flats, outputs: Flats) -> None:
        """Does not compare sizes: each rank may send other ones."""
        size = sum(flat.bytes for flat in inputs)
        self.monitor.begin("all_to_all", size=size, same=False)  # each rank may send other sizes
        with _MonitoredCollective(self):
            self._engine.all_to_all(inputs, outputs)

    def barrier(self) -> None:
        self.monitor.begin("barrier")
        with _MonitoredCollective(self):
            self._engine.barrier()

    def _monitored(self, name: str, flat: Flat, op: str = "", root: int = -1) -> _MonitoredCollective:
        self.monitor.begin(name, flat.dtype if op else "", op, root, flat.bytes)
        return _MonitoredCollective(self)

    def set_timeout(self, seconds: float) -> None:
        self.monitor.seconds = seconds
        self._engine.set_timeout(seconds)

    def abort(self, reason: str) -> None:
        self._engine.abort(reason)

    def close(self) -> None:
        self.monitor.close()
        self._engine.close()


class _MonitoredCollective(AbstractContextManager):  # type: ignore[type-arg]
    """A collective that the monitor has registered. Its CollectiveError is explained, which ends the group."""

    __slots__ = ("_engine",)

    def __init__(self, engine: MonitoredEngine) -> None:
        self._engine = engine

    def __exit__(self, kind: object, error: BaseException | None, at: object) -> None:
        """Tells the monitor that it ended. A CollectiveError is replaced by an explained one; other errors pass."""
        monitor = self._engine.monitor
        try:
            if isinstance(error, CollectiveError):
                reason = monitor.explain(error)
                self._engine.abort(reason)
                raise CollectiveError(reason) from None
        finally:
            monitor.end()


def cut_pieces(flat: Flat, shards: int) -> Sequence[Flat]:
    """Cuts a tensor into pieces of 4 MiB, or 64 KiB a shard if more; each a multiple of `shards`, as is the tensor."""
    length = max(PIECE_BYTES // shards, MESSAGE_BYTES) // native.ITEM_BYTES[flat.dtype]
    return flat.split(length * shards)


def interleave(collectives: Iterable[Iterator[None]]) -> None:
    """Runs collectives so that they overlap: the network carries the next pieces while this rank reduces one.

    In each turn one starts, and those that wait for messages continue: the latest first, on all ranks.
    """
    running: deque[Iterator[None]] = deque()
    for collective in collectives:
        running.appendleft(collective)
        _advance(running)
    while running:
        _advance(running)


def _advance(running: deque[Iterator[None]]) -> None:
    for collective in list(running):
        if next(collective, running) is running:
            running.remove(collective)


def _partial_op(flat: Flat, op: str) -> str:
    """The reduction inside a host. Averages of averages do not overflow; integers are summed and divided once."""
    return "sum" if op == "avg" and flat.dtype not in native.FLOATS else op
