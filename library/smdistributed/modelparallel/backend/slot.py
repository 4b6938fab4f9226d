"""A stage computes one piece of work at a time: threads take turns, and the schedule says whose it is.

A piece of work that waits for another stage gives its turn up and asks for one again when the answer is there.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from smdistributed.modelparallel.backend.schedule import Kind, Schedule, Turn

Work = Callable[[], None]


class Slot:
    """The turns of one stage in one step. All methods may be called on any thread."""

    def __init__(self, schedule: Schedule, workers: Workers) -> None:
        self._schedule, self._workers = schedule, workers
        self._lock = threading.Lock()
        self._waiting: list[tuple[Turn, Work]] = []
        self._taken = False
        self.urgent = False
        """Whether work waits for which another stage waits. Read without a lock: it may be late by a moment."""

    def submit(self, turn: Turn, work: Work) -> None:
        """Have a worker do this when it is its turn; it has the slot until it returns."""
        self._enqueue(turn, lambda: self._workers.run(lambda: self._do(work)))

    def resume(self, turn: Turn, go_on: Work) -> None:
        """Call `go_on`, which wakes a thread, when it is its turn. That thread calls `release` at its end."""
        self._enqueue(turn, go_on)

    def release(self) -> None:
        """Give up the turn that this thread has."""
        with self._lock:
            self._taken = False
            grant = self._choose()
        if grant:
            grant()

    def give_way(self, microbatch: int) -> None:
        """Let urgent work go first."""
        lock = threading.Lock()
        lock.acquire()
        self.resume(Turn(Kind.INTERRUPTED, microbatch), lock.release)
        self.release()
        lock.acquire()

    def finish(self, microbatch: int) -> None:
        """Say that a microbatch needs nothing more here."""
        with self._lock:
            self._schedule.finish(microbatch)
            grant = self._choose()
        if grant:
            grant()

    def wake_all(self) -> None:
        """Let everything that waits go on at once, to see that the step has failed."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for _, grant in waiting:
            grant()

    def _enqueue(self, turn: Turn, grant: Work) -> None:
        with self._lock:
            self._waiting.append((turn, grant))
            chosen = self._choose()
        if chosen:
            chosen()

    def _choose(self) -> Work | None:
        if self._taken:
            self.urgent = any(turn.kind is Kind.GO_ON for turn, _ in self._waiting)
            return None
        index = self._schedule.choose([turn for turn, _ in self._waiting])
        if index is None:
            return None
        self._taken = True
        _, grant = self._waiting.pop(index)
        self.urgent = any(turn.kind is Kind.GO_ON for turn, _ in self._waiting)
        return grant

    def _do(self, work: Work) -> None:
        try:
            work()
        finally:
            self.release()


class Workers:
    """Threads that do what they are given; one more is started when none is idle. They end with the process."""

    def __init__(self, prepare: Work = lambda: None) -> None:
        self._prepare = prepare
        self._lock = threading.Lock()
        self._idle: list[queue.SimpleQueue[Work]] = []

    def run(self, work: Work) -> None:
        with self._lock:
            inbox = self._idle.pop() if self._idle else None
        if inbox is None:
            inbox = queue.SimpleQueue()
            threading.Thread(target=self._serve, args=(inbox,), name="smp-worker", daemon=True).start()
        inbox.put(work)

    def _serve(self, inbox: queue.SimpleQueue[Work]) -> None:
        self._prepare()
        while True:
            inbox.get()()
            with self._lock:
                self._idle.append(inbox)
