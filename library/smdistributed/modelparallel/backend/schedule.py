"""The turns of a stage, which computes for one microbatch at a time: `Schedule` grants them, and `Slot` passes them on.

A stage alternates between forwards and backwards, as one-forward-one-backward (1F1B) pipelines do. But it takes work
that is ready, rather than wait for the next one in a fixed order. A microbatch may begin at stage s while fewer than
`active_microbatches` - s earlier ones are unfinished there, because later stages need fewer in flight. The loss is
computed on the first stage, which needs one more in flight than classical 1F1B.
Work that resumes after a remote call comes first, because other stages wait for its result.

A thread that waits for another stage gives up its turn, and asks for one again when the answer has arrived. A method
that frees the stage returns the request that is granted next. Its caller then starts or wakes that thread.

Ranks that share tensors must compute in one order: their collectives would mix otherwise. The first of them decides
(`LeadingSchedule`), and the others grant the same turns (`FollowingSchedule`). A turn that the first rank has granted
depends only on turns that were granted before, on all stages. So each follower gets it too, and none waits forever.
"""

from __future__ import annotations

import enum
import queue
import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

from smdistributed.modelparallel.backend.exceptions import SMPRuntimeError
from smdistributed.modelparallel.backend.transport import Waiter


class TurnKind(enum.Enum):
    RESUME = "resume"  # a forward, after a remote call
    INTERRUPTED = "interrupted"  # a forward that made way for a RESUME
    FORWARD = "forward"
    BACKWARD = "backward"


_MOST_URGENT = (TurnKind.RESUME, TurnKind.INTERRUPTED)


@dataclass(frozen=True)
class Turn:
    """The right to compute for one microbatch on a stage. `key`: names it, on all ranks that compute in one order."""

    kind: TurnKind
    microbatch: int
    key: Hashable = None


class TurnOrder(Protocol):
    """Decides which turn is next on a stage. `interrupts`: whether a forward may make way for more urgent work."""

    interrupts: bool

    def choose(self, waiting: Sequence[Turn]) -> int | None: ...
    def finish(self, microbatch: int) -> None: ...


class Schedule:
    """Decides the order of turns on one stage, for one step.

    `window`: a microbatch may begin here while fewer than this many earlier ones are unfinished; at least 1.
    `in_order`: backwards run in the order of the microbatches, so that gradients add up to the same sums in every run.
    """

    interrupts = True

    def __init__(self, window: int, in_order: bool = False) -> None:
        self._window, self._in_order = max(1, window), in_order
        self._last = TurnKind.BACKWARD
        self._begun: set[int] = set()
        self._finished: set[int] = set()

    def choose(self, waiting: Sequence[Turn]) -> int | None:
        """Returns the index of the next turn, and notes that it has begun; None if none may begin yet."""
        best = min(
            (index for index, turn in enumerate(waiting) if self._may_begin(turn)),
            key=lambda index: self._rank_turn(waiting[index]),
            default=None,
        )
        if best is not None:
            turn = waiting[best]
            self._begun.add(turn.microbatch)
            if turn.kind in (TurnKind.FORWARD, TurnKind.BACKWARD):
                self._last = turn.kind
        return best

    def finish(self, microbatch: int) -> None:
        self._finished.add(microbatch)

    def _may_begin(self, turn: Turn) -> bool:
        """Ordered backwards wait for earlier microbatches. For other turns the window counts."""
        if self._in_order and turn.kind is TurnKind.BACKWARD:
            return self._finished.issuperset(range(turn.microbatch))
        if turn.microbatch in self._begun:
            return True
        earlier = [m for m in self._begun - self._finished if m < turn.microbatch]
        return len(earlier) < self._window

    def _rank_turn(self, turn: Turn) -> tuple[int, int]:
        """Sorts resumed work first, then the kind that was not last, then the other; earlier microbatches first."""
        if turn.kind in _MOST_URGENT:
            return _MOST_URGENT.index(turn.kind), turn.microbatch
        return len(_MOST_URGENT) + (turn.kind is self._last), turn.microbatch


class LeadingSchedule(Schedule):
    """Decides for this rank and others. `announce(key)` is called for each turn, in order; it must not wait for turns.

    A forward makes no way for more urgent work: all ranks would have to agree on that as well.
    """

    interrupts = False

    def __init__(self, window: int, in_order: bool, announce: Callable[[Hashable], None]) -> None:
        super().__init__(window, in_order)
        self._announce = announce

    def choose(self, waiting: Sequence[Turn]) -> int | None:
        best = super().choose(waiting)
        if best is not None:
            self._announce(waiting[best].key)
        return best


class FollowingSchedule:
    """Chooses the turns that another rank has announced, in its order."""

    interrupts = False

    def __init__(self) -> None:
        self._announced: deque[Hashable] = deque()

    def follow(self, key: Hashable) -> None:
        """Adds the next turn that the other rank has granted."""
        self._announced.append(key)

    def choose(self, waiting: Sequence[Turn]) -> int | None:
        """Returns the index of the next announced turn; None as long as it does not wait here."""
        for index, turn in enumerate(waiting if self._announced else ()):
            if turn.key == self._announced[0]:
                self._announced.popleft()
                return index
        return None

    def finish(self, microbatch: int) -> None:
        """Does nothing: the other rank counts the microbatches."""


@dataclass(frozen=True)
class TurnRequest:
    """Asks for a turn: either `run` is new work for any free thread, or `waiter` belongs to a thread that waits."""

    turn: Turn
    run: Callable[[], None] | None = None
    waiter: Waiter | None = None


class Slot:
    """Grants the turns of one stage in one step. All methods may be called on any thread.

    Each returns the request that is granted because of the change, if there is one. The caller must start it, and
    `release` must be called when that turn ends.
    """

    def __init__(self, schedule: TurnOrder) -> None:
        self._schedule = schedule
        self._lock = threading.Lock()
        self._waiting: list[TurnRequest] = []
        self._taken = False
        self.has_resumable = False
        """Whether a forward that resumes is waiting, for which others make way. Read without the lock: it may lag."""

    def request(self, request: TurnRequest) -> TurnRequest | None:
        with self._lock:
            self._waiting.append(request)
            return self._grant_next()

    def release(self) -> TurnRequest | None:
        with self._lock:
            self._taken = False
            return self._grant_next()

    def exchange(self, request: TurnRequest) -> TurnRequest | None:
        with self._lock:
            self._taken = False
            self._waiting.append(request)
            return self._grant_next()

    def finish(self, microbatch: int) -> TurnRequest | None:
        with self._lock:
            self._schedule.finish(microbatch)
            return self._grant_next()

    def follow(self, key: Hashable) -> TurnRequest | None:
        """Adds a turn that another rank has granted. Raises SMPRuntimeError if this rank follows none."""
        with self._lock:
            if not isinstance(self._schedule, FollowingSchedule):
                raise SMPRuntimeError("A rank has sent an order of turns, and this one decides itself.")
            self._schedule.follow(key)
            return self._grant_next()

    def drain(self) -> list[TurnRequest]:
        """Removes and returns the requests not granted yet: their threads must see that the step has failed."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
            return waiting

    def _grant_next(self) -> TurnRequest | None:
        """Takes the next request from the queue if the slot is free and a turn may begin. Updates `has_resumable`."""
        granted = None
        if not self._taken and self._waiting:
            index = self._schedule.choose([request.turn for request in self._waiting])
            if index is not None:
                self._taken = True
                granted = self._waiting.pop(index)
        if self._schedule.interrupts:
            self.has_resumable = any(request.turn.kind is TurnKind.RESUME for request in self._waiting)
        return granted


class WorkerThreads:
    """Daemon threads; one more is started if none is idle. `prepare` is called once on each new one."""

    def __init__(self, prepare: Callable[[], None] = lambda: None) -> None:
        self._prepare = prepare
        self._lock = threading.Lock()
        self._idle: list[queue.SimpleQueue[Callable[[], None]]] = []

    def run(self, function: Callable[[], None]) -> None:
        """Runs a function on an idle thread, or on a new one. Does not wait for it."""
        with self._lock:
            inbox = self._idle.pop() if self._idle else None
        if inbox is None:
            inbox = queue.SimpleQueue()
            threading.Thread(target=self._run_forever, args=(inbox,), name="smp-worker", daemon=True).start()
        inbox.put(function)

    def _run_forever(self, inbox: queue.SimpleQueue[Callable[[], None]]) -> None:
        """The body of each thread: runs the functions from its inbox, and is idle in between. An error ends it."""
        self._prepare()
        while True:
            inbox.get()()
            with self._lock:
                self._idle.append(inbox)
