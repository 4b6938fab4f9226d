"""The ranks of a TensorFlow job as one group: the engine that they share, and the thread that works for operations."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from smdistributed.core import engine_selection, timeline
from smdistributed.core.diagnostics import CollectiveError, read_seconds
from smdistributed.core.engines import Engine
from smdistributed.core.exceptions import SMDDPError
from smdistributed.core.flat import Flat, allocate
from smdistributed.core.launch import Launch
from smdistributed.core.mpi import mpi_network
from smdistributed.core.store import JobStore, open_store
from smdistributed.core.tensorflow import operations
from smdistributed.core.tensorflow.operations import Work

DIRECT_BYTES = 256 << 10  # what is shorter is copied together: a collective more costs more than copying it
PACK_BYTES = 4 << 20
CHOICES = ("auto", "shm", "mpi")
_TIMEOUT_SECONDS = 1800  # as in torch.distributed


class Pair(NamedTuple):
    """A tensor and where its result goes, which may be the same place."""

    given: Flat
    result: Flat


class Group:
    """Runs the operations of this process on `engine`, in the order in which they come. One for each process.

    name: of the engine, and why it is that one.
    """

    def __init__(self, engine: Engine, name: str, store: JobStore, rank: int) -> None:
        self._engine, self.engine, self._store, self._rank = engine, name, store, rank
        self._scratch = allocate(PACK_BYTES, "uint8")
        operations.load()
        threading.Thread(target=operations.serve, args=(self._do,), name="smddp-tensorflow", daemon=True).start()

    def _do(self, work: Work) -> None:
        kind, dtype = operations.KINDS[work.kind], work.dtype_name
        pairs = [
            Pair(Flat(given, elements, dtype), Flat(result, elements, dtype))
            for given, result, elements in work.tensors()
            if elements
        ]
        about = {"bytes": sum(pair.result.bytes for pair in pairs), "tensors": work.count}
        with timeline.span("communication", kind, about):
            for together in batches(pairs):
                self._run(kind, work, together)

    def _run(self, kind: str, work: Work, together: list[Pair]) -> None:
        given, result = together[0] if len(together) == 1 else self._pack(together)
        if kind == "all_reduce":
            source = given if given.address != result.address else None
            self._engine.all_reduce(result, work.name.decode(), source=source)
        else:
            if self._rank == work.rank and given.address != result.address:
                result.copy_from(given)
            self._engine.broadcast(result, work.rank)
        if len(together) > 1:
            self._unpack(together)

    def _pack(self, pairs: Iterable[Pair]) -> Pair:
        at = count = 0
        for given, _ in pairs:
            self._scratch.cut(at, at + given.bytes).copy_from(given)
            at, count, dtype = at + given.bytes, count + given.count, given.dtype
        packed = Flat(self._scratch.address, count, dtype)
        return Pair(packed, packed)

    def _unpack(self, pairs: Iterable[Pair]) -> None:
        at = 0
        for _, result in pairs:
            result.copy_from(self._scratch.cut(at, at + result.bytes))
            at += result.bytes

    def close(self) -> None:
        """Leave the group: no collective can run after that."""
        self._engine.close()
        self._store.close()


def open_group(launch: Launch, store: JobStore | None = None, ranks: Sequence[int] | None = None) -> Group:
    """Open the engine of these ranks of the job, by default of all. To be called by all of them, once.

    store: the job's, if it is open already.

    Raises SMDDPError where SMDDP_ENGINE asks for what TensorFlow has not, or SMDDP_TIMEOUT_SECONDS is no number
    above 0.
    """
    wanted = engine_selection.requested_engine(CHOICES)
    try:
        seconds = read_seconds("SMDDP_TIMEOUT_SECONDS", _TIMEOUT_SECONDS)
    except CollectiveError as error:
        raise SMDDPError(str(error)) from None
    the_store = store or open_store(launch)
    members = list(ranks or range(launch.world_size))
    group = engine_selection.RankGroup(
        store=the_store.prefixed(f"tensorflow-{members[0]}"),
        rank=members.index(launch.rank),
        size=len(members),
        seconds=seconds,
        connect=lambda: the_store,
        number=launch.rank,
        is_first=members[0] == 0,
    )
    engine, name = engine_selection.open_engine(group, mpi_network(group), wanted)
    return Group(engine, name, the_store, group.rank)


def batches(pairs: Iterable[Pair]) -> Iterator[list[Pair]]:
    """What is reduced at a time: a long tensor alone, where it lies, or short ones together, up to PACK_BYTES."""
    together: list[Pair] = []
    filled = 0
    for pair in pairs:
        size = pair.given.bytes
        if size >= DIRECT_BYTES:
            yield [pair]
            continue
        if filled + size > PACK_BYTES:
            yield together
            together, filled = [], 0
        together.append(pair)
        filled += size
    if together:
        yield together
