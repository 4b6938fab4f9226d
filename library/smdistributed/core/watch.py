"""Which ranks do not come, where the ranks of a group are on several hosts: they tell each other through a store.

A thread on each rank asks the store now and then whether somebody wants to know where this rank is, and says so. The
rank that has waited for `stall_seconds`, or whose collective has failed, asks all others, compares what they have
called, and says what it finds, in its own log and in that of one rank of each other host. Collectives themselves send
nothing to the store.
"""

from __future__ import annotations

import logging
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

from smdistributed.core import diagnostics
from smdistributed.core.board import StoreLog, CountingStore
from smdistributed.core.clocks import Clocks
from smdistributed.core.diagnostics import CollectiveError, UnexplainedError
from smdistributed.core.shared_memory import Member

_MOST_LOOK_SECONDS = 1.0
_RANKS_A_SECOND = 500  # that ask the store, however many there are: more are of use to nobody
_BUSY_SECONDS = 0.05  # between two looks while there is something to wait for
_MOST_NAMED, _MOST_SHOWN = 16, 4  # ranks that a message names, and those whose stacks it shows
_STACK_CHARACTERS = 4000
_TAG, _TAG_BITS = 1 << 30, (1 << 30) - 1

_log = logging.getLogger(__name__)


class Call(NamedTuple):
    """A collective that a rank has called; `number` from 1, `digest` of it and all before it."""

    number: int = 0
    name: str = ""
    dtype: str = ""
    op: str = ""
    root: int = -1
    bytes: int = 0
    digest: int = 0

    def __str__(self) -> str:
        return diagnostics.described(*self[:-1])


class _Status(NamedTuple):
    """What a rank answers."""

    rank: int
    call: Call
    waits: bool
    stack: str


class _Failure:
    """A collective that has failed, and what is found about it."""

    def __init__(self, error: CollectiveError, waited: float) -> None:
        self.error, self.waited = error, waited
        self.text = str(error)
        self.is_found = threading.Event()


class Watch:
    """Knows what this rank of a group calls, and finds out who is late.

    members: all ranks of the group. seconds: how long ranks wait for each other. connect: opens the store, when it is
    needed; its own connection, because others of this process may wait for a word in theirs. clocks: whether this group
    compares the clocks of its hosts (see `Clocks`).

    Raises CollectiveError when SMDDP_STALL_SECONDS is no number above 0.
    """

    def __init__(
        self,
        rank: int,
        members: Sequence[Member],
        seconds: float,
        connect: Callable[[], CountingStore],
        clocks: bool = False,
    ) -> None:
        self.seconds = seconds
        self.call = Call()
        self.about: Callable[[int], str] = lambda _: ""
        """What is known of a tensor of so many bytes."""
        self._rank, self._members, self._connect, self._clocked = rank, members, connect, clocks
        self._stall = diagnostics.stall_seconds()
        slowest = max(_MOST_LOOK_SECONDS, len(members) / _RANKS_A_SECOND)
        self._look = min(slowest, self._stall / 4, seconds / 10)
        self._began = 0.0  # of what this rank waits in; 0: in nothing
        self._warned, self._heard = 0, 0
        self._broken: tuple[int, str] | None = None  # who has given up, and why
        self._log_store: StoreLog | None = None
        self._clocks: Clocks | None = None
        self._failure: _Failure | None = None
        self._silent: list[int] = []
        self._woken, self._closed = threading.Event(), False
        self._thread = threading.Thread(target=self._serve, name="smddp-watch", daemon=True)
        if len(members) > 1:
            self._thread.start()

    def begin(self, name: str, dtype: str = "", op: str = "", root: int = -1, size: int = 0, same: bool = True) -> None:
        """This rank calls a collective. same: whether `size` is that of all ranks, as it mostly must be.

        Raises CollectiveError when another rank has given up.
        """
        before = self.call
        what = f"{name} {dtype} {op} {root} {size if same else -1}"
        self.call = Call(before.number + 1, name, dtype, op, root, size, zlib.crc32(what.encode(), before.digest))
        if self._broken is not None:
            raise CollectiveError(self._said())
        self._began = time.monotonic()

    def end(self) -> None:
        """The collective has ended."""
        self._began = 0.0

    def tag(self, size: int) -> int:
        """The tag of the messages of this collective, of `size` bytes: those of another one never meet them.

        gloo ends the process when a message is larger than what it is received into.
        """
        return _TAG | ((self.call.digest ^ zlib.crc32(size.to_bytes(8, "little"))) & _TAG_BITS)

    def explain(self, error: CollectiveError) -> str:
        """Find out why this rank's collective has failed, and let the others know that the group has ended."""
        failure = _Failure(error, time.monotonic() - self._began)
        self._failure = failure
        self._woken.set()
        if not self._thread.is_alive() or not failure.is_found.wait(4 * self._answer_seconds + 4 * self._look):
            return f"{error}\n{self._no_store('does not answer')}"
        return failure.text

    def close(self) -> None:
        """End the thread."""
        self._closed = True
        self._woken.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(self._answer_seconds)

    @property
    def _answer_seconds(self) -> float:
        """How long a rank takes to answer at most, unless it has ended or is stopped."""
        return 1.5 * self._look + 0.5

    def _serve(self) -> None:
        while not self._closed:
            self._woken.wait(self._look if self._broken is None else None)  # later there is nothing to ask for
            self._woken.clear()
            if self._closed:
                return
            try:
                self._turn()
            except Exception as error:  # stores raise what they like: it is gone, with the rank that served it
                self._without_store(error)
                return

    def _without_store(self, error: Exception) -> None:
        """Nobody can be asked any more; mostly because the job has ended."""
        _log.debug("smddp: the store is gone: %s", error)
        while not self._closed:
            failure = self._failure
            if failure is not None and not failure.is_found.is_set():
                failure.text = self._said() if self._broken else f"{failure.error}\n{self._no_store('is gone')}"
                failure.is_found.set()
            self._woken.wait()
            self._woken.clear()

    def _no_store(self, does: str) -> str:
        first = self._named([0]) if self._members[0].number == 0 else "rank 0"  # which is in no other place of a group
        return (
            f"The store where the ranks have met {does}: {first} has ended or stopped, or the launcher that serves it."
        )

    def _turn(self) -> None:
        if self._log_store is None:
            self._log_store = StoreLog(self._connect(), f"smddp-watch/{self._members[0].token}")
            if self._clocked:
                hosts = [member.process.host for member in self._members]
                self._clocks = Clocks(self._log_store, self._rank, hosts, self._look)
        if self._broken is None:
            self._hear(self._log_store)
        call, began = self.call, self._began
        if began and call.number != self._warned and time.monotonic() - began > self._stall:
            self._warned = call.number
            self._warn(self._log_store, call, began)
        failure = self._failure
        if failure is not None and not failure.is_found.is_set():
            self._give_up(self._log_store, failure)
            failure.is_found.set()
            if self._members[self._rank].number == 0:
                self._linger(self._log_store)
        if self._clocks is not None:
            self._clocks.compare()

    def _hear(self, board: StoreLog) -> None:
        """Read what others have said to all."""
        for word in board.read("words", self._heard):
            self._heard += 1
            if word["rank"] == self._rank:
                continue
            if word["kind"] == "ask":
                stack = diagnostics.main_thread_stack()[-_STACK_CHARACTERS:]
                board.append(f"answers-{self._heard}", _Status(self._rank, self.call, bool(self._began), stack))
            elif word["kind"] == "warning" and self._is_first_of_host(word["rank"]):
                _log.warning(f"smddp: rank {self._members[word['rank']].number} says: {word['text']}")
            elif word["kind"] == "broken":
                self._broken = word["rank"], word["text"]
                board.append("heard", self._rank)
            elif word["kind"] == "clock" and self._clocks is not None and self._rank == 0:
                self._clocks.answer(word["name"])

    def _is_first_of_host(self, other_than: int) -> bool:
        """Of several ranks of one host one is enough to tell what another host's rank says."""
        hosts = [member.process.host for member in self._members]
        mine = hosts[self._rank]
        return hosts.index(mine) == self._rank and mine != hosts[other_than]

    def _ask(self, board: StoreLog) -> dict[int, _Status]:
        """Where all others are, if they say so in time."""
        asked = board.append("words", {"kind": "ask", "rank": self._rank})
        told: dict[int, _Status] = {}
        deadline = time.monotonic() + self._answer_seconds
        while len(told) < len(self._members) - 1 and time.monotonic() < deadline and not self._closed:
            time.sleep(min(_BUSY_SECONDS, self._look))
            self._hear(board)  # others may ask at the same time
            for rank, call, waits, stack in board.read(f"answers-{asked}", len(told)):
                told[rank] = _Status(rank, Call(*call), waits, stack)
        self._silent = [rank for rank in range(len(self._members)) if rank != self._rank and rank not in told]
        return told

    def _warn(self, board: StoreLog, call: Call, began: float) -> None:
        """The first to wait for so long tells, for all who wait in this collective."""
        if len(board.read(f"stall-{call.number}")) or board.append(f"stall-{call.number}", self._rank) > 1:
            return
        told = self._ask(board)
        if self.call != call or not self._began:
            return  # those who were late have come meanwhile
        waited = time.monotonic() - began
        late = self._late(call, told, f" for {waited:.0f} s; this rank gives up in {self.seconds - waited:.0f} s.")
        bucket = self.about(call.bytes)
        text = late + (bucket and f"\nThe tensor is {bucket}.")
        _log.warning(f"smddp: {text}")
        board.append("words", {"kind": "warning", "rank": self._rank, "text": text})

    def _give_up(self, board: StoreLog, failure: _Failure) -> None:
        """The first to give up says why, and the others what that one says."""
        if self._broken is None and not board.read("giving-up") and board.append("giving-up", self._rank) == 1:
            failure.text = self._found(board, failure)
            self._broken = self._rank, failure.text
            board.append("words", {"kind": "broken", "rank": self._rank, "text": failure.text})
            board.append("heard", self._rank)
            return
        deadline = time.monotonic() + 2 * self._answer_seconds
        while self._broken is None and time.monotonic() < deadline and not self._closed:
            time.sleep(min(_BUSY_SECONDS, self._look))
            self._hear(board)
        if self._broken is not None:
            failure.text = self._said()

    def _found(self, board: StoreLog, failure: _Failure) -> str:
        if not isinstance(failure.error, UnexplainedError):
            return f"{failure.error}\nThat was in {self.call}."
        if failure.waited >= 0.9 * self.seconds:
            return self._late(self.call, self._ask(board), f" within {self.seconds:.0f} s, the group's timeout.")
        return f"{self._late(self.call, self._ask(board), '.')}\n{failure.error}"

    def _said(self) -> str:
        rank, text = self._broken or (self._rank, "")
        says = f"rank {self._members[rank].number}: {text}"
        return diagnostics.peer_aborted(self._members[self._rank].number, str(self.call), says)

    def _linger(self, board: StoreLog) -> None:
        """Rank 0 stays until all have heard why: the store may end with its process."""
        deadline = time.monotonic() + self._answer_seconds
        there = len(self._members) - len(self._silent)
        while len(board.read("heard")) < there and time.monotonic() < deadline:  # also when closed: who closes waits
            time.sleep(min(_BUSY_SECONDS, self._look))
            self._hear(board)

    def _late(self, call: Call, told: dict[int, _Status], how_long: str) -> str:
        """Say who is to blame that this rank waits in `call`."""
        for rank, status in told.items():
            if status.call.number == call.number and status.call.digest != call.digest:
                mine, other = self._members[self._rank].number, self._members[rank].number
                return diagnostics.collective_mismatch(mine, str(call), other, str(status.call))
        behind = [rank for rank, status in told.items() if status.call.number < call.number]
        late = sorted(behind + self._silent)
        if not late:
            waiting = self._named([rank for rank, status in told.items() if status.waits and status.call == call])
            return (
                f"All ranks have come to {call}, but messages between them have not arrived{how_long} "
                f"It has not ended either on {waiting or 'any other'}: is the network between the hosts cut or slow?"
            )
        where = "".join(
            diagnostics.describe_laggard(
                self._members[rank].number,
                str(told[rank].call) if rank in told else "what nobody knows",
                told[rank].stack if rank in told else None,
            )
            for rank in late[:_MOST_SHOWN]
        )
        return f"{self._named(late)} did not come to {call}{how_long}{where}"

    def _named(self, ranks: Sequence[int]) -> str:
        named = [
            f"rank {member.number} (process {member.process.pid} on {member.host})"
            for member in (self._members[rank] for rank in ranks[:_MOST_NAMED])
        ]
        more = len(ranks) - len(named)
        return ", ".join(named) + (f" and {more} more" if more else "")
