"""Finds out why a collective of a group on several hosts does not end; the ranks tell each other through a store.

A thread on each rank checks now and then whether another rank requests a report, and answers. The first rank that has
waited for SMDDP_STALL_SECONDS requests reports of all others and compares their collectives. It logs the result, as
does one rank of each other host. If a collective fails, the first rank to notice ends the group: its explanation
becomes the text of the error on all ranks. The thread also compares the hosts' clocks (`clocks`). Collectives
themselves send nothing to the store.
"""

from __future__ import annotations

import logging
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

from smdistributed.core import diagnostics
from smdistributed.core.clocks import Clocks
from smdistributed.core.diagnostics import CollectiveError, StallDetector, UnexplainedError
from smdistributed.core.members import Member
from smdistributed.core.store import Store, StoreLog

_MAX_POLL_SECONDS = 1.0
_POLLS_PER_SECOND = 500  # of all ranks together: more would only load the store
_BUSY_SECONDS = 0.05  # between two checks while this rank expects an answer
_MAX_NAMED, _MAX_SHOWN = 16, 4  # ranks in a message: with their names, and with their stacks too
_STACK_CHARACTERS = 4000
_TAG, _TAG_BITS = 1 << 30, (1 << 30) - 1

_log = logging.getLogger(__name__)


class Call(NamedTuple):
    """A rank's collective: its number, from 1, its arguments, and a digest of it and all earlier ones."""

    number: int = 0
    name: str = ""
    dtype: str = ""
    op: str = ""
    root: int = -1
    bytes: int = 0
    digest: int = 0

    def __str__(self) -> str:
        return diagnostics.describe_collective(*self[:-1])


class _Report(NamedTuple):
    """A rank's answer to a request: its last collective, whether it is still in it, and its main thread's stack."""

    rank: int
    call: Call
    waits: bool
    stack: str


class _FailedCollective:
    def __init__(self, error: CollectiveError, waited: float) -> None:
        self.error, self.waited = error, waited
        self.text = str(error)
        self.is_explained = threading.Event()


class GroupMonitor:
    """Tracks this rank's collectives, and explains why one does not end. Starts a thread if there are several ranks.

    Ranks wait `seconds` for each other. `connect` opens the store for the thread: other calls of this process may block
    in their connection. `compares_clocks`: whether this group compares the clocks of its hosts (see `Clocks`). Raises
    CollectiveError if SMDDP_STALL_SECONDS is invalid.
    """

    def __init__(
        self,
        rank: int,
        members: Sequence[Member],
        seconds: float,
        connect: Callable[[], Store],
        compares_clocks: bool = False,
    ) -> None:
        self.seconds = seconds
        self.call = Call()
        self.describe_tensor: Callable[[int], str] = lambda _: ""
        """Describes the tensor of that many bytes; empty: unknown."""
        self._rank, self._members, self._connect, self._compares_clocks = rank, members, connect, compares_clocks
        self._stalls = StallDetector()
        slowest = max(_MAX_POLL_SECONDS, len(members) / _POLLS_PER_SECOND)
        self._poll_seconds = min(slowest, self._stalls.seconds / 4, seconds / 10)
        self._began = 0.0  # when this rank's collective started; 0: none runs
        self._read = 0  # messages to all ranks that this rank has read
        self._aborted: tuple[int, str] | None = None  # the rank that ended the group, and the reason
        self._log_store: StoreLog | None = None
        self._clocks: Clocks | None = None
        self._failure: _FailedCollective | None = None
        self._silent: list[int] = []  # ranks that did not answer the last request
        self._wakeup, self._closed = threading.Event(), False
        self._thread = threading.Thread(target=self._run_forever, name="smddp-monitor", daemon=True)
        if len(members) > 1:
            self._thread.start()

    def begin(self, name: str, dtype: str = "", op: str = "", root: int = -1, size: int = 0, same: bool = True) -> None:
        """Registers the collective that this rank calls now. `same`: whether `size` must be the same on all ranks.

        Raises CollectiveError if another rank has ended the group.
        """
        before = self.call
        arguments = f"{name} {dtype} {op} {root} {size if same else -1}"
        self.call = Call(before.number + 1, name, dtype, op, root, size, zlib.crc32(arguments.encode(), before.digest))
        if self._aborted is not None:
            raise CollectiveError(self._describe_abort())
        self._began = time.monotonic()

    def end(self) -> None:
        self._began = 0.0

    def message_tag(self, size: int) -> int:
        """Returns the tag for messages of `size` bytes in this collective; other collectives have other tags.

        gloo ends the process if a message is larger than the memory it is received into.
        """
        return _TAG | ((self.call.digest ^ zlib.crc32(size.to_bytes(8, "little"))) & _TAG_BITS)

    def explain(self, error: CollectiveError) -> str:
        """Returns why this rank's collective failed, or that the store is lost, and ends the group for all ranks."""
        failure = _FailedCollective(error, time.monotonic() - self._began)
        self._failure = failure
        self._wakeup.set()
        limit = 4 * self._answer_seconds + 4 * self._poll_seconds
        if not self._thread.is_alive() or not failure.is_explained.wait(limit):
            return f"{error}\n{self._describe_lost_store('does not answer')}"
        return failure.text

    def close(self) -> None:
        """Ends the thread and waits for it, but not forever; does nothing if it does not run."""
        self._closed = True
        self._wakeup.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(self._answer_seconds)

    @property
    def _answer_seconds(self) -> float:
        """The longest time in which a rank answers, unless it has ended or is stopped."""
        return 1.5 * self._poll_seconds + 0.5

    def _run_forever(self) -> None:
        """Thread: checks the store until `close`; after an abort only when this rank's collective fails."""
        while not self._closed:
            self._wakeup.wait(self._poll_seconds if self._aborted is None else None)  # no requests after an abort
            self._wakeup.clear()
            if self._closed:
                return
            try:
                self._check_store()
            except Exception as error:  # of any type, by the store: the rank that served it has ended
                self._run_without_store(error)
                return

    def _run_without_store(self, error: Exception) -> None:
        """Explains each failure by the lost store, or by an abort that was read, until the monitor is closed."""
        _log.debug("smddp: the store is lost: %s", error)
        while not self._closed:
            failure = self._failure
            if failure is not None and not failure.is_explained.is_set():
                lost = f"{failure.error}\n{self._describe_lost_store('is lost')}"
                failure.text = self._describe_abort() if self._aborted else lost
                failure.is_explained.set()
            self._wakeup.wait()
            self._wakeup.clear()

    def _describe_lost_store(self, problem: str) -> str:
        # a rank 0 of the job is always the first of its group
        first = self._describe_ranks([0]) if self._members[0].number == 0 else "rank 0"
        return f"The job's store {problem}: {first} has ended or stopped, or the launcher that serves it."

    def _check_store(self) -> None:
        """Acts on messages, stalls and failures, and compares clocks. Rank 0 stays until others have read an abort."""
        if self._log_store is None:
            self._log_store = StoreLog(self._connect(), f"smddp-monitor/{self._members[0].token}")
            if self._compares_clocks:
                hosts = [member.process.host for member in self._members]
                self._clocks = Clocks(self._log_store, self._rank, hosts, self._poll_seconds)
        if self._aborted is None:
            self._read_messages(self._log_store)
        call, began = self.call, self._began
        if began and self._stalls.is_new_stall(call.number, time.monotonic() - began):
            self._warn(self._log_store, call, began)
        failure = self._failure
        if failure is not None and not failure.is_explained.is_set():
            self._abort_group(self._log_store, failure)
            failure.is_explained.set()
            if self._members[self._rank].number == 0:
                self._wait_for_readers(self._log_store)
        if self._clocks is not None:
            self._clocks.compare()

    def _read_messages(self, log: StoreLog) -> None:
        """Acts on new messages: reports its stack, confirms an abort, answers for clocks, logs a host's warnings."""
        for message in log.read("messages", self._read):
            self._read += 1
            if message["rank"] == self._rank:
                continue
            if message["kind"] == "request":
                stack = diagnostics.main_thread_stack()[-_STACK_CHARACTERS:]
                log.append(f"reports-{self._read}", _Report(self._rank, self.call, bool(self._began), stack))
            elif message["kind"] == "warning" and self._is_first_of_host(message["rank"]):
                _log.warning(f"smddp: rank {self._members[message['rank']].number} reports: {message['text']}")
            elif message["kind"] == "abort":
                self._aborted = message["rank"], message["text"]
                log.append("abort-read", self._rank)
            elif message["kind"] == "clock" and self._clocks is not None and self._rank == 0:
                self._clocks.answer(message["name"])

    def _is_first_of_host(self, other: int) -> bool:
        """Whether this rank logs the warnings of `other`: one rank of each other host does."""
        hosts = [member.process.host for member in self._members]
        mine = hosts[self._rank]
        return hosts.index(mine) == self._rank and mine != hosts[other]

    def _request_reports(self, log: StoreLog) -> dict[int, _Report]:
        """Returns the other ranks' reports that arrive in time, and notes silent ranks. Meanwhile it answers others."""
        number = log.append("messages", {"kind": "request", "rank": self._rank})
        reports: dict[int, _Report] = {}
        deadline = time.monotonic() + self._answer_seconds
        while len(reports) < len(self._members) - 1 and time.monotonic() < deadline and not self._closed:
            time.sleep(min(_BUSY_SECONDS, self._poll_seconds))
            self._read_messages(log)  # other ranks may request reports at the same time
            for rank, call, waits, stack in log.read(f"reports-{number}", len(reports)):
                reports[rank] = _Report(rank, Call(*call), waits, stack)
        self._silent = [rank for rank in range(len(self._members)) if rank != self._rank and rank not in reports]
        return reports

    def _warn(self, log: StoreLog, call: Call, began: float) -> None:
        """Logs which ranks are late, and tells the other hosts. Asks all ranks for reports first, which takes seconds.

        The first rank to wait so long does it for all in this collective. Nothing is logged if it ends meanwhile.
        """
        if len(log.read(f"stall-{call.number}")) or log.append(f"stall-{call.number}", self._rank) > 1:
            return
        reports = self._request_reports(log)
        if self.call != call or not self._began:
            return  # the late ranks have arrived meanwhile
        waited = time.monotonic() - began
        duration = f" for {waited:.0f} s; this rank aborts in {self.seconds - waited:.0f} s."
        bucket = self.describe_tensor(call.bytes)
        text = self._describe_wait(call, reports, duration) + (bucket and f"\nThe tensor is {bucket}.")
        _log.warning(f"smddp: {text}")
        log.append("messages", {"kind": "warning", "rank": self._rank, "text": text})

    def _abort_group(self, log: StoreLog, failure: _FailedCollective) -> None:
        """Ends the group for all ranks. The first rank to fail explains it. The others wait for its text."""
        if self._aborted is None and not log.read("aborting") and log.append("aborting", self._rank) == 1:
            failure.text = self._explain_failure(log, failure)
            self._aborted = self._rank, failure.text
            log.append("messages", {"kind": "abort", "rank": self._rank, "text": failure.text})
            log.append("abort-read", self._rank)
            return
        deadline = time.monotonic() + 2 * self._answer_seconds
        while self._aborted is None and time.monotonic() < deadline and not self._closed:
            time.sleep(min(_BUSY_SECONDS, self._poll_seconds))
            self._read_messages(log)
        if self._aborted is not None:
            failure.text = self._describe_abort()

    def _explain_failure(self, log: StoreLog, failure: _FailedCollective) -> str:
        """Says why the collective failed. If the error does not, asks the other ranks and waits for answers."""
        if not isinstance(failure.error, UnexplainedError):
            return f"{failure.error}\nThat was in {self.call}."
        reports = self._request_reports(log)
        if failure.waited >= 0.9 * self.seconds:
            return self._describe_wait(self.call, reports, f" within {self.seconds:.0f} s, the group's timeout.")
        return f"{self._describe_wait(self.call, reports, '.')}\n{failure.error}"

    def _describe_abort(self) -> str:
        rank, text = self._aborted or (self._rank, "")
        report = f"rank {self._members[rank].number}: {text}"
        return diagnostics.peer_aborted(self._members[self._rank].number, str(self.call), report)

    def _wait_for_readers(self, log: StoreLog) -> None:
        """Keeps rank 0 and its store for a short time, until the ranks that answer have read the reason."""
        deadline = time.monotonic() + self._answer_seconds
        readers = len(self._members) - len(self._silent)
        while len(log.read("abort-read")) < readers and time.monotonic() < deadline:  # also when closed: close() waits
            time.sleep(min(_BUSY_SECONDS, self._poll_seconds))
            self._read_messages(log)

    def _describe_wait(self, call: Call, reports: dict[int, _Report], duration: str) -> str:
        """Names the ranks that cause this rank's wait, with stacks of late ones. If none does, suspects the network."""
        for rank, report in reports.items():
            if report.call.number == call.number and report.call.digest != call.digest:
                mine, other = self._members[self._rank].number, self._members[rank].number
                return diagnostics.collective_mismatch(mine, str(call), other, str(report.call))
        behind = [rank for rank, report in reports.items() if report.call.number < call.number]
        late = sorted(behind + self._silent)
        if not late:
            waiting = self._describe_ranks(
                [rank for rank, report in reports.items() if report.waits and report.call == call]
            )
            return (
                f"All ranks have reached {call}, but messages between them have not arrived{duration} "
                f"It has not ended on {waiting or 'any other rank'} either. Is the network between the hosts cut or "
                "slow?"
            )
        laggards = "".join(
            diagnostics.describe_laggard(
                self._members[rank].number,
                str(reports[rank].call) if rank in reports else "an unknown collective",
                reports[rank].stack if rank in reports else None,
            )
            for rank in late[:_MAX_SHOWN]
        )
        return f"{self._describe_ranks(late)} did not reach {call}{duration}{laggards}"

    def _describe_ranks(self, ranks: Sequence[int]) -> str:
        named = [self._members[rank].describe() for rank in ranks[:_MAX_NAMED]]
        more = len(ranks) - len(named)
        return ", ".join(named) + (f" and {more} more" if more else "")
