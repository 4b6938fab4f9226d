"""The communication engine of ranks on one host: the C engine, in memory that they share.

library/native/engine.h explains the algorithm. Sums run in rank order, so all ranks get the same bits in every run.
"""

from __future__ import annotations

import ctypes
import json
import logging
import mmap
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from smdistributed.core import diagnostics, native, segment
from smdistributed.core.diagnostics import CollectiveError, StallDetector, UnexplainedError, main_thread_stack
from smdistributed.core.engines import Engine, Flats
from smdistributed.core.flat import Flat
from smdistributed.core.members import Member
from smdistributed.core.native import DTYPE_NUMBERS, OP_NUMBERS, CollectiveDesc, pointer_array
from smdistributed.core.store import Store, exchange_texts

SETTINGS: dict[str, Any] = json.loads(Path(__file__).with_name("data").joinpath("engine.json").read_text())
"""Measured values. slot_bytes: the largest that fits is used. short_bytes: limit of a short message. spins: before a
rank sleeps. poll_seconds: how often it then checks the others. report_seconds: how long a rank may take to report."""

_LOST, _LATE = 1, 2  # statuses that `_poll` sets, in addition to the C engine's
_NO_FILE = "nowhere"

_log = logging.getLogger(__name__)


class ShmEngine(Engine):
    """Collectives through shared memory. Two threads must not call it at once. Starts a thread that reports.

    Ranks that are late cause a warning after SMDDP_STALL_SECONDS and an error after `seconds`. If the group is
    monitored, a `GroupMonitor` does both: ranks of this host may wait for others elsewhere.
    """

    def __init__(
        self, memory: mmap.mmap, rank: int, members: Sequence[Member], slot_bytes: int, seconds: float, monitored: bool
    ) -> None:
        self.rank, self.size, self.seconds = rank, len(members), seconds
        self._memory, self._members, self._monitored = memory, members, monitored
        self._native = native.load()
        self._poll_fn = native.POLL_FN(self._poll)  # kept here: the C engine calls it
        self._raised: BaseException | None = None
        self._ended, self._closed = "", False
        self._lost: list[int] = []
        self._stalls = StallDetector()
        # mpirun may bind each rank to one CPU: the CPUs of all ranks count.
        self.spins = len({cpu for member in members for cpu in member.cpus}) >= self.size
        spins = SETTINGS["spins"] if self.spins else 0
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        short = min(SETTINGS["short_bytes"], 4 * SETTINGS["short_bytes"] // self.size)
        self._engine = self._native.engine_open(
            address, rank, self.size, slot_bytes, slot_bytes, short, spins, SETTINGS["poll_seconds"], self._poll_fn
        )
        self._reporter = threading.Thread(target=self._report_on_request, name="smddp-reports", daemon=True)
        self._reporter.start()

    def all_reduce(self, flat: Flat, op: str, root: int = -1, source: Flat | None = None) -> None:
        address, count, dtype, _ = flat
        given = source.address if source else address
        self._check(
            self._native.engine_all_reduce(
                self._open_engine(), given, address, count, DTYPE_NUMBERS[dtype], OP_NUMBERS[op], root
            )
        )

    def broadcast(self, flat: Flat, root: int) -> None:
        self._check(self._native.engine_broadcast(self._open_engine(), flat.address, flat.bytes, root))

    def gather(self, flat: Flat, outputs: Flats, root: int = -1) -> None:
        into = _pointers(outputs)
        self._check(self._native.engine_gather(self._open_engine(), flat.address, into, flat.bytes, root))

    def scatter(self, inputs: Flats, flat: Flat, root: int) -> None:
        given = _pointers(inputs)
        self._check(self._native.engine_scatter(self._open_engine(), given, flat.address, flat.bytes, root))

    def reduce_scatter(self, inputs: Flats, flat: Flat, op: str) -> None:
        dtype = DTYPE_NUMBERS[flat.dtype]
        self._check(
            self._native.engine_reduce_scatter(
                self._open_engine(), _pointers(inputs), flat.address, flat.count, dtype, OP_NUMBERS[op]
            )
        )

    def all_to_all(self, inputs: Flats, outputs: Flats) -> None:
        """Exchanges parts of any sizes. Compares them first: if they do not fit, aborts and raises CollectiveError."""
        sent = self._exchange_sizes([flat.bytes for flat in inputs])
        for rank, output in enumerate(outputs):
            if sent[rank][self.rank] != output.bytes:
                self.abort(
                    f"all_to_all: rank {self._number(rank)} sends rank {self._me} {sent[rank][self.rank]} bytes, which "
                    f"expects {output.bytes}: check output_split_sizes against the others' input_split_sizes."
                )
                raise CollectiveError(self._ended)
        sizes = ctypes.c_size_t * self.size
        self._check(
            self._native.engine_all_to_all(
                self._open_engine(),
                *(_pointers(inputs), sizes(*(flat.bytes for flat in inputs))),
                *(_pointers(outputs), sizes(*(flat.bytes for flat in outputs))),
                max(map(max, sent)),
            )
        )

    def _exchange_sizes(self, sizes: Sequence[int]) -> list[list[int]]:
        """Returns the bytes that each rank sends to each rank; a collective. `sizes`: from this rank to each."""
        row = ctypes.c_int64 * self.size
        mine, table = row(*sizes), (row * self.size)()
        rows = Flat(ctypes.addressof(table), self.size**2, "int64").chunk(self.size)
        self.gather(Flat(ctypes.addressof(mine), self.size, "int64"), rows)
        return [list(given) for given in table]

    def barrier(self) -> None:
        self._check(self._native.engine_barrier(self._open_engine()))

    def set_timeout(self, seconds: float) -> None:
        self.seconds = seconds

    def abort(self, reason: str) -> None:
        """Ends the group: collectives of its ranks on this host fail with the reason. Only the first reason counts."""
        if not self._ended:
            self._ended = reason
            self._native.engine_abort(self._engine, f"rank {self._me}: {reason}".encode(errors="replace"))

    def close(self) -> None:
        """Ends the reporter's thread and frees the shared memory, once. If the thread stays, so does the memory."""
        if not self._closed:
            self._closed, self._ended = True, "the group was closed"
            self._native.engine_request_report(self._engine, self.rank)  # wakes the reporter, which ends
            self._reporter.join(SETTINGS["report_seconds"])
            if not self._reporter.is_alive():
                self._native.engine_close(self._engine)
                self._memory.close()

    def _open_engine(self) -> int:
        """Returns the C engine's address. Raises CollectiveError, or UnexplainedError if monitored, after an abort."""
        if self._ended:
            raise (UnexplainedError if self._monitored else CollectiveError)(self._ended)
        return self._engine  # type: ignore[no-any-return]

    def _check(self, status: int) -> None:
        """Aborts the group and raises if a status is not 0: the interrupt, CollectiveError or UnexplainedError."""
        if not status:
            return
        if status == native.INTERRUPTED:
            raised, self._raised = self._raised or KeyboardInterrupt(), None
            self.abort(f"a collective was interrupted ({type(raised).__name__})")
            raise raised
        reason = self._explain(status)
        self.abort(reason)
        raise (UnexplainedError if self._monitored and status in (native.ABORTED, _LATE) else CollectiveError)(reason)

    def _report_on_request(self) -> None:
        """Thread: reports where the script is, when other ranks request it."""
        reported = 0
        while True:
            reported = self._native.engine_wait_for_request(self._engine, reported)
            if self._closed:
                return
            self._native.engine_report(self._engine, reported, main_thread_stack().encode(errors="replace"))

    def _poll(self, rank: int, waited: float, status: Any) -> None:
        """Called by the C engine while this rank waits; a status other than 0 ends the wait. `_check` raises errors.

        A signal handler may raise before the first line. Then the C engine reports an interrupt.
        """
        try:
            status[0] = self._check_others(rank, waited)
        except BaseException as error:  # a KeyboardInterrupt arrives here; the caller is C
            self._raised = error

    def _check_others(self, rank: int, waited: float) -> int:
        """Notes ended ranks, logs a stall unless monitored, and returns 0, ABORTED, _LOST or _LATE."""
        self._lost = [other for other in self._others() if not self._members[other].process.is_alive]
        if self._native.engine_abort_reason(self._engine) is not None:  # checked second: a rank aborts before it ends
            return native.ABORTED
        if rank in self._lost:
            return _LOST
        if waited > self.seconds:
            return _LATE
        if not self._monitored and self._stalls.is_new_stall(self._last_collective(self.rank).number, waited):
            self._warn(waited)
        return 0

    def _explain(self, status: int) -> str:
        """Says why a collective ended so. Unless monitored, asks late ranks for stacks and waits a moment."""
        mine = self._last_collective(self.rank)
        if status == native.ABORTED:
            report = (self._native.engine_abort_reason(self._engine) or b"").decode(errors="replace")
            return diagnostics.peer_aborted(self._me, _describe(mine), report)
        if status == native.MISMATCH:
            other = self._native.engine_mismatched_rank(self._engine)
            theirs = _describe(self._last_collective(other))
            return diagnostics.collective_mismatch(self._me, _describe(mine), self._number(other), theirs)
        if status == _LOST:
            return f"{self._describe_ranks(self._lost)} ended while rank {self._me} waited in {_describe(mine)}."
        stacks = "" if self._monitored else self._describe_laggards(mine)
        return f"{self._describe_wait(mine)} within {self.seconds:.0f} s, the group's timeout.{stacks}"

    def _warn(self, waited: float) -> None:
        """Logs which ranks are late, with their stacks; waits a moment for those."""
        mine = self._last_collective(self.rank)
        _log.warning(
            f"smddp: {self._describe_wait(mine)} for {waited:.0f} s; this rank aborts in "
            f"{self.seconds - waited:.0f} s.{self._describe_laggards(mine)}"
        )

    def _describe_wait(self, mine: CollectiveDesc) -> str:
        return f"{self._describe_ranks(self._late_ranks(mine))} did not reach {_describe(mine)}"

    def _late_ranks(self, mine: CollectiveDesc) -> list[int]:
        """Returns the other ranks that have called fewer collectives; all other ranks if none has."""
        late = [rank for rank in self._others() if self._last_collective(rank).number < mine.number]
        return late or self._others()

    def _describe_laggards(self, mine: CollectiveDesc) -> str:
        """Returns where late ranks are. Asks them, and waits a moment for their reports."""
        requests = {rank: self._native.engine_request_report(self._engine, rank) for rank in self._late_ranks(mine)}
        deadline = time.monotonic() + SETTINGS["report_seconds"]
        stacks: dict[int, str] = {}
        while requests.keys() - stacks.keys() and time.monotonic() < deadline:
            time.sleep(0.01)
            for rank, request in requests.items():
                report = self._native.engine_report_of(self._engine, rank, request)
                if report is not None:
                    stacks[rank] = report.decode(errors="replace")
        return "".join(
            diagnostics.describe_laggard(self._number(rank), _describe(self._last_collective(rank)), stacks.get(rank))
            for rank in requests
        )

    def _others(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]

    def _last_collective(self, rank: int) -> CollectiveDesc:
        found = CollectiveDesc()
        self._native.engine_last_collective(self._engine, rank, ctypes.byref(found))
        return found

    def _describe_ranks(self, ranks: Sequence[int]) -> str:
        return ", ".join(self._members[rank].describe(shows_host=False) for rank in ranks)

    def _number(self, rank: int) -> int:
        return self._members[rank].number

    @property
    def _me(self) -> int:
        return self._number(self.rank)


def open_shm_engine(
    store: Store, rank: int, members: Sequence[Member], seconds: float, monitored: bool = False
) -> ShmEngine | str:
    """Opens the shm engine of one host's ranks, or returns why they cannot share memory, the same on all of them.

    Every one of them calls it and waits for the others. An invalid SMDDP_STALL_SECONDS raises CollectiveError.
    """
    memory, slot_bytes, problem, made = _map(store, rank, len(members))
    problems = exchange_texts(store, "problem", rank, len(members), problem)
    if made is not None:  # all ranks have tried to map it
        made.unlink(missing_ok=True)
    found = [f"rank {members[other].number}: {text}" for other, text in enumerate(problems) if text]
    if found or memory is None:
        return "; ".join(found)
    return ShmEngine(memory, rank, members, slot_bytes, seconds, monitored)


def choose_slot_bytes(size: int) -> tuple[int, int]:
    """Returns the largest slot that fits into half of the free shared memory, and the memory then shared; in bytes."""
    lengths = {slot: _length(size, slot) for slot in SETTINGS["slot_bytes"]}
    slot = next((slot for slot, length in lengths.items() if length <= segment.free_bytes() // 2), min(lengths))
    return slot, lengths[slot]


def _map(store: Store, rank: int, size: int) -> tuple[mmap.mmap | None, int, str, Path | None]:
    """Maps rank 0's file. Returns the memory and the slot size, or the problem; on rank 0 also the file's path."""
    try:
        if rank == 0:
            memory, slot_bytes, made = _make(store, size)
            return memory, slot_bytes, "", made
        slot, _, path = store.get("path").decode().partition(":")
        if path == _NO_FILE:
            return None, 0, "rank 0 has made none", None
        if slot not in map(str, SETTINGS["slot_bytes"]):
            return None, 0, "rank 0 has not written this entry of the store", None
        return segment.attach(Path(path), _length(size, int(slot))), int(slot), "", None
    except OSError as error:
        return None, 0, str(error), None


def _length(size: int, slot_bytes: int) -> int:
    return int(native.load().engine_bytes(size, slot_bytes))


def _make(store: Store, size: int) -> tuple[mmap.mmap, int, Path]:
    """Creates the shared memory. Writes its path, or its problem, into the store, so that no rank waits."""
    slot_bytes, length = choose_slot_bytes(size)
    try:
        path, memory = segment.create(length)
    except OSError:
        store.set("path", f"0:{_NO_FILE}")
        raise
    store.set("path", f"{slot_bytes}:{path}")
    return memory, slot_bytes, path


def _pointers(flats: Flats) -> ctypes.Array[ctypes.c_void_p]:
    return pointer_array([flat.address for flat in flats])


def _describe(desc: CollectiveDesc) -> str:
    name, dtype, op = native.COLLECTIVES[desc.collective], native.DTYPES[desc.dtype], native.OPS[desc.op]
    return diagnostics.describe_collective(desc.number, name, dtype, op, desc.root, desc.bytes)
