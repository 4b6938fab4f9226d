"""Collectives of the ranks of one host through memory that they share: the compiled engine, from Python.

Tensors are given by their addresses, and must be contiguous; whoever calls sees to that, and keeps them alive. How the
engine works stands in library/native/engine.h. Sums run in the order of the ranks: all ranks hold the same bits, run
for run.
"""

from __future__ import annotations

import ctypes
import json
import logging
import mmap
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smdistributed.core import diagnostics, native, segment
from smdistributed.core.diagnostics import CollectiveError, Store, UnexplainedError, main_thread_stack, stall_seconds
from smdistributed.core.reductions import DTYPES, OPS, pointers
from smdistributed.core.segment import Process

SETTINGS: dict[str, Any] = json.loads(Path(__file__).with_name("data").joinpath("engine.json").read_text())
"""Measured: slots of these sizes (bytes; the largest that fits), what counts as short (bytes), how often a rank looks
before it sleeps, how long (seconds) until it looks whether the others live, and how long another may take to report."""

_LOST, _LATE = 1, 2
_NOWHERE = "nowhere"

_log = logging.getLogger(__name__)


class SharedMemory:
    """The ranks of a group that all run on this host. Not to be called by two threads at once.

    Every method raises CollectiveError when a rank has ended, has not come within `seconds`, or calls another
    collective than this rank. Where the group is watched (`Watch`), ranks that are late are left to that: those of
    this host may wait for others elsewhere.
    """

    def __init__(
        self, memory: mmap.mmap, rank: int, members: Sequence[Member], slot_bytes: int, seconds: float, watched: bool
    ) -> None:
        self.rank, self.size, self.seconds = rank, len(members), seconds
        self._memory, self._members, self._monitored = memory, members, watched
        self._native = native.load()
        self._poll = native.POLL_FN(self._on_look)  # held here: the engine calls it
        self._raised: BaseException | None = None
        self._broken, self._closed = "", False
        self._lost: list[int] = []
        self._told = 0  # the last collective of which a warning was given
        # mpirun may bind each rank to a CPU of its own: those of all ranks count.
        self.spins = len({cpu for member in members for cpu in member.cpus}) >= self.size
        spins = SETTINGS["spins"] if self.spins else 0
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        short = min(SETTINGS["short_bytes"], 4 * SETTINGS["short_bytes"] // self.size)
        self._engine = self._native.engine_open(
            address, rank, self.size, slot_bytes, slot_bytes, short, spins, SETTINGS["poll_seconds"], self._poll
        )
        self._answering = threading.Thread(target=self._answer, name="smddp-answers", daemon=True)
        self._answering.start()

    def close(self) -> None:
        """Give the memory back; the group is of no use any more."""
        if not self._closed:
            self._closed, self._broken = True, "the group was closed"
            self._native.engine_request_report(self._engine, self.rank)
            self._answering.join(SETTINGS["answer_seconds"])
            if not self._answering.is_alive():
                self._native.engine_close(self._engine)
                self._memory.close()

    def _answer(self) -> None:
        """Tell other ranks, when they ask, where this one's script is. Runs in a thread of its own."""
        reported = 0
        while True:
            reported = self._native.engine_wait_for_request(self._engine, reported)
            if self._closed:
                return
            self._native.engine_report(self._engine, reported, main_thread_stack().encode(errors="replace"))

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self._call(self._native.engine_barrier)

    def all_reduce(self, address: int, count: int, dtype: str, op: str, root: int = -1, source: int = 0) -> None:
        """Combine `count` elements over the ranks: on all of them (-1), or on rank `root` alone.

        source: where this rank's elements are; 0: at `address`, where the result comes.
        """
        number = DTYPES[dtype]
        self._call(self._native.engine_all_reduce, source or address, address, count, number, OPS[op], root)

    def broadcast(self, address: int, size: int, root: int) -> None:
        """Copy rank `root`'s `size` bytes to that of every rank."""
        self._call(self._native.engine_broadcast, address, size, root)

    def gather(self, address: int, outputs: Sequence[int], size: int, root: int = -1) -> None:
        """Copy every rank's `size` bytes to that of `outputs` which has its number: on all (-1), or on `root`."""
        self._call(self._native.engine_gather, address, pointers(outputs), size, root)

    def scatter(self, inputs: Sequence[int], address: int, size: int, root: int) -> None:
        """Copy that of `root`'s `inputs` which has a rank's number, of `size` bytes, to that rank."""
        self._call(self._native.engine_scatter, pointers(inputs), address, size, root)

    def reduce_scatter(self, inputs: Sequence[int], address: int, count: int, dtype: str, op: str) -> None:
        """Combine over the ranks that of `inputs` which has this rank's number, of `count` elements."""
        number = DTYPES[dtype]
        self._call(self._native.engine_reduce_scatter, pointers(inputs), address, count, number, OPS[op])

    def all_to_all(
        self, inputs: Sequence[int], input_sizes: Sequence[int], outputs: Sequence[int], output_sizes: Sequence[int]
    ) -> None:
        """Copy to each rank what `inputs` has for it, and from each into `outputs`; sizes in bytes, any of them 0.

        What a rank gives and what the other expects must be the same, or CollectiveError tells which are not.
        """
        expected = self._sizes_given(input_sizes)
        most = max(max(given) for given in expected)
        wrong = [rank for rank in range(self.size) if expected[rank][self.rank] != output_sizes[rank]]
        if wrong:
            rank = wrong[0]
            self._fail(
                f"all_to_all: rank {self._number(rank)} gives rank {self._me} {expected[rank][self.rank]} bytes, "
                f"which expects {output_sizes[rank]}: check output_split_sizes against the others' input_split_sizes."
            )
        lengths = ctypes.c_size_t * self.size
        self._call(
            self._native.engine_all_to_all,
            *(pointers(inputs), lengths(*input_sizes), pointers(outputs), lengths(*output_sizes), most),
        )

    def _sizes_given(self, sizes: Sequence[int]) -> list[list[int]]:
        """What each rank gives to each other."""
        row = ctypes.c_int64 * self.size
        mine, table = row(*sizes), (row * self.size)()
        rows = [ctypes.addressof(table) + rank * ctypes.sizeof(row) for rank in range(self.size)]
        self.gather(ctypes.addressof(mine), rows, ctypes.sizeof(row))
        return [list(given) for given in table]

    def _call(self, function: Callable[..., int], *arguments: object) -> None:
        if self._broken:
            raise (UnexplainedError if self._monitored else CollectiveError)(self._broken)
        code = function(self._engine, *arguments)
        if code:
            self._end(code)

    def _end(self, code: int) -> None:
        if code == native.INTERRUPTED:
            raised, self._raised = self._raised or KeyboardInterrupt(), None
            self._break(f"a collective was interrupted ({type(raised).__name__})")
            raise raised
        self._break(reason := self._reason(code))
        raise (UnexplainedError if self._monitored and code in (native.ABORTED, _LATE) else CollectiveError)(reason)

    def _fail(self, reason: str) -> None:
        self._break(reason)
        raise CollectiveError(reason)

    def give_up(self, reason: str) -> None:
        """Let no rank begin another collective, nor go on with one."""
        if not self._broken:
            self._break(reason)

    def _break(self, reason: str) -> None:
        self._broken = reason
        self._native.engine_abort(self._engine, f"rank {self._me}: {reason}".encode(errors="replace"))

    def _on_look(self, rank: int, waited: float, said: Any) -> None:
        """Called by the engine while this rank waits for another; what it says, where that is not 0, ends that.

        A signal's handler may raise before the first line: then nothing is said, and the engine takes it for an
        interrupt.
        """
        try:
            said[0] = self._look_around(rank, waited)
        except BaseException as error:  # an interrupt arrives here; beyond is C
            self._raised = error

    def _look_around(self, rank: int, waited: float) -> int:
        self._lost = [other for other in self._others() if not self._members[other].process.lives]
        if self._native.engine_abort_reason(self._engine) is not None:  # later: who gives up says so before it ends
            return native.ABORTED
        if rank in self._lost:
            return _LOST
        if waited > self.seconds:
            return _LATE
        if not self._monitored and waited > stall_seconds():
            self._warn(waited)
        return 0

    def _reason(self, code: int) -> str:
        here = self._doing(self.rank)
        if code == native.ABORTED:
            said = (self._native.engine_abort_reason(self._engine) or b"").decode(errors="replace")
            return diagnostics.peer_aborted(self._me, _described(here), said)
        if code == native.MISMATCH:
            other = self._native.engine_mismatched_rank(self._engine)
            theirs = _described(self._doing(other))
            return diagnostics.collective_mismatch(self._me, _described(here), self._number(other), theirs)
        if code == _LOST:
            return f"{self._named(self._lost)} ended while rank {self._me} waited in {_described(here)}."
        where = "" if self._monitored else self._where(here)
        return f"{self._late(here)} within {self.seconds:.0f} s, the group's timeout.{where}"

    def _warn(self, waited: float) -> None:
        here = self._doing(self.rank)
        if self._told != here.number:
            self._told = here.number
            left = self.seconds - waited
            _log.warning(
                f"smddp: {self._late(here)} for {waited:.0f} s; this rank gives up in {left:.0f} s.{self._where(here)}"
            )

    def _late(self, here: native.CollectiveDesc) -> str:
        return f"{self._named(self._behind(here))} did not come to {_described(here)}"

    def _behind(self, here: native.CollectiveDesc) -> list[int]:
        return [rank for rank in self._others() if self._doing(rank).number < here.number] or self._others()

    def _where(self, here: native.CollectiveDesc) -> str:
        """What those who are late have called last, and where they are now."""
        requested = {rank: self._native.engine_request_report(self._engine, rank) for rank in self._behind(here)}
        deadline = time.monotonic() + SETTINGS["answer_seconds"]
        told: dict[int, str] = {}
        while requested.keys() - told.keys() and time.monotonic() < deadline:
            time.sleep(0.01)
            for rank, request in requested.items():
                report = self._native.engine_report_of(self._engine, rank, request)
                if report is not None:
                    told[rank] = report.decode(errors="replace")
        return "".join(
            diagnostics.describe_laggard(self._number(rank), _described(self._doing(rank)), told.get(rank)) for rank in requested
        )

    def _others(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]

    def _doing(self, rank: int) -> native.CollectiveDesc:
        found = native.CollectiveDesc()
        self._native.engine_last_collective(self._engine, rank, ctypes.byref(found))
        return found

    def _named(self, ranks: Sequence[int]) -> str:
        return ", ".join(f"rank {self._number(rank)} (process {self._members[rank].process.pid})" for rank in ranks)

    def _number(self, rank: int) -> int:
        return self._members[rank].number

    @property
    def _me(self) -> int:
        return self._number(self.rank)


@dataclass(frozen=True)
class Member:
    """A rank of a group."""

    process: Process
    number: int
    """Its rank in the job, by which people know it."""
    host: str
    """The name of its host."""
    token: str
    """Nobody else's, also not of the same process in another group."""
    problem: str
    """Why it has no engine; empty: it has one."""
    cpus: Sequence[int]
    """Those of its host on which it may run."""


def meet(store: Store, rank: int, size: int, number: int | None = None) -> list[Member]:
    """Return all ranks of a group, in their order. store: of this group alone. number: see Member; else the rank."""
    host = os.environ.get("SMDDP_HOST") or socket.gethostname()
    cpus = sorted(os.sched_getaffinity(0))
    about = [rank if number is None else number, host, secrets.token_hex(8), without_engine(), cpus]
    mine = json.dumps([segment.this_process(), *about])
    told = [json.loads(text) for text in exchange(store, "process", rank, size, mine)]
    return [Member(Process(*process), *others) for process, *others in told]


def share(
    store: Store, rank: int, members: Sequence[Member], seconds: float, watched: bool = False
) -> SharedMemory | str:
    """Return the shared memory of the ranks of one host, or why they have none; the same of the two on all of them.

    store: of these ranks alone. rank: among them. seconds: how long ranks wait for each other. watched: see
    SharedMemory.
    """
    size = len(members)
    memory, slot_bytes, problem, made = _map(store, rank, size)
    problems = exchange(store, "problem", rank, size, problem)
    if made is not None:  # all have tried to map it
        made.unlink(missing_ok=True)
    found = [f"rank {members[other].number}: {text}" for other, text in enumerate(problems) if text]
    if found or memory is None:
        return "; ".join(found)
    return SharedMemory(memory, rank, members, slot_bytes, seconds, watched)


def without_engine() -> str:
    """Why this machine cannot run the engine; empty where it can."""
    try:
        native.load()
    except OSError as error:
        return str(error)
    return "" if sys.platform == "linux" else f"{sys.platform} is not supported"


def exchange(store: Store, name: str, rank: int, size: int, text: str) -> list[str]:
    """Tell the others something, and return what each has told."""
    store.set(f"{name}-{rank}", text)
    return [store.get(f"{name}-{other}").decode() for other in range(size)]


def _map(store: Store, rank: int, size: int) -> tuple[mmap.mmap | None, int, str, Path | None]:
    """Map the file that rank 0 makes; returns that and the bytes of a slot, or why not; on rank 0, its path."""
    try:
        if rank == 0:
            memory, slot_bytes, made = _make(store, size)
            return memory, slot_bytes, "", made
        slot, _, path = store.get("path").decode().partition(":")
        if path == _NOWHERE:
            return None, 0, "rank 0 has made none", None
        if slot not in map(str, SETTINGS["slot_bytes"]):
            return None, 0, "what the store says of it was not written by rank 0", None
        return segment.attach(Path(path), _length(size, int(slot))), int(slot), "", None
    except OSError as error:
        return None, 0, str(error), None


def choose_slot_bytes(size: int) -> tuple[int, int]:
    """The largest slot for which there is room, and what `size` ranks share with it; both in bytes."""
    lengths = {slot: _length(size, slot) for slot in SETTINGS["slot_bytes"]}
    slot = next((slot for slot, length in lengths.items() if length <= segment.room() // 2), min(lengths))
    return slot, lengths[slot]


def _length(size: int, slot_bytes: int) -> int:
    return int(native.load().engine_bytes(size, slot_bytes))


def _make(store: Store, size: int) -> tuple[mmap.mmap, int, Path]:
    slot_bytes, length = choose_slot_bytes(size)
    try:
        path, memory = segment.create(length)
    except OSError:
        store.set("path", f"0:{_NOWHERE}")
        raise
    store.set("path", f"{slot_bytes}:{path}")
    return memory, slot_bytes, path


def _described(recent: native.CollectiveDesc) -> str:
    name, dtype, op = native.COLLECTIVES[recent.collective], native.DTYPES[recent.dtype], native.OPS[recent.op]
    return diagnostics.described(recent.number, name, dtype, op, recent.root, recent.bytes)
