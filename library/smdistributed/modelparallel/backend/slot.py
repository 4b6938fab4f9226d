"""A stage computes one piece of work at a time: threads take turns, and the schedule says whose it is.

A piece of work that waits for another stage gives its turn up and asks for one again when the answer is there. What is
to be done next is handed to whoever has changed something here: see `Job`.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

from smdistributed.core.mail import Waiter
from smdistributed.modelparallel.backend.schedule import Kind, Schedule, Turn


@dataclass(frozen=True)
class Job:
    """Whose turn it is: `do` is new work, for any thread that is free; `waiter` is of a thread that goes on."""

    turn: Turn
    do: Callable[[], None] | None = None
    waiter: Waiter | None = None


class Slot:
    """The turns of one stage in one step. All methods may be called on any thread.

    Each gives the job whose turn has come with the change, if there is one: the caller sees to it that it is done, and
    that `release` is called at its end.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._lock = threading.Lock()
        self._waiting: list[Job] = []
        self._taken = False
        self.urgent = False
        """Whether work waits for which another stage waits. Read without a lock: it may be late by a moment."""

    def add(self, job: Job) -> Job | None:
        """A job asks for a turn."""
        with self._lock:
            self._waiting.append(job)
            return self._choose()

    def release(self) -> Job | None:
        """Whoever had the turn gives it up."""
        with self._lock:
            self._taken = False
            return self._choose()

    def exchange(self, job: Job) -> Job | None:
        """Whoever had the turn gives it up, and asks for another."""
        with self._lock:
            self._taken = False
            self._waiting.append(job)
            return self._choose()

    def finish(self, microbatch: int) -> Job | None:
        """A microbatch needs nothing more here."""
        with self._lock:
            self._schedule.finish(microbatch)
            return self._choose()

    def drain(self) -> list[Job]:
        """All that wait: they go on at once, to see that the step has failed."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
            return waiting

    def _choose(self) -> Job | None:
        job = None
        if not self._taken and self._waiting:
            index = self._schedule.choose([waiting.turn for waiting in self._waiting])
            if index is not None:
                self._taken = True
                job = self._waiting.pop(index)
        self.urgent = any(waiting.turn.kind is Kind.GO_ON for waiting in self._waiting)
        return job


class Workers:
    """Threads that do what they are given; one more is started when none is idle. They end with the process."""

    def __init__(self, prepare: Callable[[], None] = lambda: None) -> None:
        self._prepare = prepare
        self._lock = threading.Lock()
        self._idle: list[queue.SimpleQueue[Callable[[], None]]] = []

    def run(self, work: Callable[[], None]) -> None:
        """Have a thread do this."""
        with self._lock:
            inbox = self._idle.pop() if self._idle else None
        if inbox is None:
            inbox = queue.SimpleQueue()
            threading.Thread(target=self._serve, args=(inbox,), name="smp-worker", daemon=True).start()
        inbox.put(work)

    def _serve(self, inbox: queue.SimpleQueue[Callable[[], None]]) -> None:
        self._prepare()
        while True:
            inbox.get()()
            with self._lock:
                self._idle.append(inbox)
