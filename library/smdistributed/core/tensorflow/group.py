"""The ranks of a TensorFlow job as a group: their communication engine, and the thread that runs collectives.

Also chooses the GPU of a rank, and hides the others from TensorFlow.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

import tensorflow as tf

from smdistributed.core import engine_selection, timeline
from smdistributed.core.diagnostics import CollectiveError, read_seconds
from smdistributed.core.engines import Engine
from smdistributed.core.exceptions import SMDDPError
from smdistributed.core.flat import Flat, allocate
from smdistributed.core.launch import Launch
from smdistributed.core.mpi import mpi_network
from smdistributed.core.store import JobStore, open_store
from smdistributed.core.tensorflow import operations
from smdistributed.core.tensorflow.int8 import Int8Gradients, find_int8
from smdistributed.core.tensorflow.operations import PendingOperation

DIRECT_BYTES = 256 << 10  # shorter tensors are copied together: another collective would cost more than the copy
PACK_BYTES = 4 << 20
CHOICES = ("auto", "shm", "mpi")
_TIMEOUT_SECONDS = 1800  # as in torch.distributed


class TensorPair(NamedTuple):
    """The memory of a tensor, and of its result; maybe the same."""

    given: Flat
    result: Flat


class Group:
    """Runs the collectives of this process in order, in a thread. A process may have one. `close` closes `store`."""

    def __init__(self, engine: Engine, name: str, store: JobStore, rank: int) -> None:
        self._engine, self.engine, self._store, self._rank = engine, name, store, rank
        self._scratch = allocate(PACK_BYTES, "uint8")
        operations.load()
        serve = operations.serve_forever
        threading.Thread(target=serve, args=(self._run_operation,), name="smddp-tensorflow", daemon=True).start()

    def _run_operation(self, operation: PendingOperation) -> None:
        """Runs and records a collective: long tensors one by one, short ones packed together, empty ones not."""
        kind, dtype = operations.KINDS[operation.kind], operation.dtype_name
        pairs = [
            TensorPair(Flat(given, elements, dtype), Flat(result, elements, dtype))
            for given, result, elements in operation.tensors()
            if elements
        ]
        details = {"bytes": sum(pair.result.bytes for pair in pairs), "tensors": operation.count}
        with timeline.span("communication", kind, details):
            for part, batch in enumerate(batch_tensors(pairs)):
                self._run_batch(kind, operation, batch, part)

    def _run_batch(self, kind: str, operation: PendingOperation, batch: list[TensorPair], part: int) -> None:
        given, result = batch[0] if len(batch) == 1 else self._pack(batch)
        if kind == "all_reduce":
            self._all_reduce(given, result, operation.name.decode(), part)
        else:
            if self._rank == operation.rank and given.address != result.address:
                result.copy_from(given)
            self._engine.broadcast(result, operation.rank)
        if len(batch) > 1:
            self._unpack(batch)

    def _all_reduce(self, given: Flat, result: Flat, reduction: str, part: int) -> None:
        op, int8, bucket = find_int8(reduction)
        if int8 and bucket == part == 0 and int8.trial.is_measuring:
            self._begin_step(int8)
        is_apart = given.address != result.address
        if int8 and int8.trial.compresses():
            if is_apart:
                result.copy_from(given)
            self._engine.all_reduce_int8(result, op, int8.lost(bucket, part, result.count))
        else:
            self._engine.all_reduce(result, op, source=given if is_apart else None)

    def _begin_step(self, int8: Int8Gradients) -> None:
        """Ends the trial after its last step; the slowest rank counts, so all ranks decide the same."""
        medians = int8.trial.begin_step()
        if medians:
            slowest = (ctypes.c_double * 2)(*medians)
            self._engine.all_reduce(Flat(ctypes.addressof(slowest), 2, "float64", slowest), "max")
            without, compressed = slowest
            int8.trial.decide(without, compressed, self._rank)

    def _pack(self, pairs: Iterable[TensorPair]) -> TensorPair:
        """Copies tensors of one dtype, at most PACK_BYTES in all, into the scratch memory, and returns them as one."""
        at = count = 0
        for given, _ in pairs:
            self._scratch.cut(at, at + given.bytes).copy_from(given)
            at, count, dtype = at + given.bytes, count + given.count, given.dtype
        packed = Flat(self._scratch.address, count, dtype)
        return TensorPair(packed, packed)

    def _unpack(self, pairs: Iterable[TensorPair]) -> None:
        at = 0
        for _, result in pairs:
            result.copy_from(self._scratch.cut(at, at + result.bytes))
            at += result.bytes

    def close(self) -> None:
        """Closes the communication engine and the store. No collective can run after that; the thread stays."""
        self._engine.close()
        self._store.close()


def open_group(launch: Launch, store: JobStore | None = None, ranks: Sequence[int] | None = None) -> Group:
    """Opens the communication engine of a group of ranks (default: all). All of them call this, once.

    Raises the errors of `open_engine` and, without a `store`, of `open_store`. Raises SMDDPError if TensorFlow does not
    support the communication engine that SMDDP_ENGINE requests, or SMDDP_TIMEOUT_SECONDS is not a number above 0.
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


def batch_tensors(pairs: Iterable[TensorPair]) -> Iterator[list[TensorPair]]:
    """Yields a long tensor alone, or short ones of up to PACK_BYTES; one of DIRECT_BYTES or more may come earlier."""
    batch: list[TensorPair] = []
    filled = 0
    for pair in pairs:
        size = pair.given.bytes
        if size >= DIRECT_BYTES:
            yield [pair]
            continue
        if filled + size > PACK_BYTES:
            yield batch
            batch, filled = [], 0
        batch.append(pair)
        filled += size
    if batch:
        yield batch


def take_gpu(local_rank: int) -> None:
    """Makes one GPU the only one that TensorFlow sees, and lets its memory grow. Does nothing without GPUs.

    It is the local rank's, modulo their number. Raises SMDDPError if TensorFlow already uses other GPUs.
    """
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        return
    mine = gpus[local_rank % len(gpus)]
    try:
        tf.config.set_visible_devices(mine, "GPU")
        with suppress(ValueError):  # the script has set a limit of its own
            tf.config.experimental.set_memory_growth(mine, True)
    except RuntimeError as error:
        if tf.config.get_visible_devices("GPU") != [mine]:
            raise SMDDPError(
                f"TensorFlow has begun to use its GPUs before init() could choose the GPU of local rank {local_rank} "
                f"({error}). Fix: call init() right after the imports."
            ) from None
