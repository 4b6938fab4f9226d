"""A stage computes for one microbatch at a time: threads take turns, and the schedule grants them.

A thread that waits for another stage gives up its turn, and asks for one again when the answer has arrived. A method
that frees the stage returns the request that is granted next. Its caller then starts or wakes that thread.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

from smdistributed.modelparallel.backend.schedule import Schedule, Turn, TurnKind
from smdistributed.modelparallel.backend.transport import Waiter


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

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._lock = threading.Lock()
        self._waiting: list[TurnRequest] = []
        self._taken = False
        self.has_resumable = False
        """Whether a forward that resumes is waiting. Read without the lock: it may lag by a moment."""

    def request(self, request: TurnRequest) -> TurnRequest | None:
        """Asks for a turn. Returns the request that is granted now, this or another; None if none is."""
        with self._lock:
            self._waiting.append(request)
            return self._grant_next()

    def release(self) -> TurnRequest | None:
        """Gives up the turn. Returns the request that is granted next; None if none is."""
        with self._lock:
            self._taken = False
            return self._grant_next()

    def exchange(self, request: TurnRequest) -> TurnRequest | None:
        """Gives up the turn and asks for another one. Returns the request that is granted next; None if none is."""
        with self._lock:
            self._taken = False
            self._waiting.append(request)
            return self._grant_next()

    def finish(self, microbatch: int) -> TurnRequest | None:
        """Notes that a microbatch needs no more turns here. Returns the request that is granted now, or None."""
        with self._lock:
            self._schedule.finish(microbatch)
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
        self.has_resumable = any(request.turn.kind is TurnKind.RESUME for request in self._waiting)
        return granted


class WorkerThreads:
    """Daemon threads that run functions; one more is started if none is idle. They end with the process.

    Args:
        prepare: Called once on each new thread.
    """

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
