"""A small event loop for descriptors, timers, child processes and signals, in one thread.

It uses `select.poll`, because importing asyncio, or even selectors and subprocess, takes longer than a whole no-op job
should.
"""

from __future__ import annotations

import heapq
import os
import select
import signal
import time
from collections.abc import Callable, Iterable

from shoal_toolkit.fast_typing import Any

READ = select.POLLIN
WRITE = select.POLLOUT
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
PASSED_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)  # for the script: Slurm, submitit and Lightning save at one
_GONE = select.POLLHUP | select.POLLERR | select.POLLNVAL


class Timer:
    """A call of `callback` at the time `when` of the monotonic clock, unless `cancel` is called before."""

    def __init__(self, when: float, callback: Callable[[], None]) -> None:
        self.when = when
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        """Prevents the call; does nothing after it."""
        self.callback = None

    def __lt__(self, other: Timer) -> bool:
        return self.when < other.when


class Loop:
    """Calls back when descriptors are ready, timers are due, child processes have ended or signals have arrived.

    Creating it takes over SIGCHLD and the wake-up descriptor of the process.
    """

    def __init__(self) -> None:
        self._poll = select.poll()
        self._watched: dict[int, dict[int, Callable[[], None]]] = {}
        self._new: set[int] = set()  # descriptors that are watched since the last poll
        self._timers: list[Timer] = []
        self._children: dict[int, Callable[[int], None]] = {}
        self._signals: dict[int, Callable[[int], None]] = {}
        self._old_handlers: dict[int, Any] = {}
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._old_wakeup = signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        self.watch(self._wake_read, READ, self._on_wakeup)
        self._install_handler(signal.SIGCHLD)

    def close(self) -> None:
        """Restores the earlier signal handlers, and closes the wake-up pipe. The loop can't be used afterwards."""
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._old_wakeup)
        os.close(self._wake_read)
        os.close(self._wake_write)

    def watch(self, fd: int, event: int, callback: Callable[[], None]) -> None:
        """Calls `callback` whenever fd is ready for the event (READ or WRITE), or broken.

        Replaces an earlier callback.
        """
        if fd not in self._watched:
            self._watched[fd] = {}
            self._new.add(fd)
        self._watched[fd][event] = callback
        self._register(fd)

    def unwatch(self, fd: int, event: int) -> None:
        """Stops watching fd for the event; ignores descriptors that are not watched."""
        if self._watched.get(fd, {}).pop(event, None):
            self._register(fd)

    def _register(self, fd: int) -> None:
        mask = 0
        for event in self._watched[fd]:
            mask |= event
        if mask:
            self._poll.register(fd, mask)
        else:
            del self._watched[fd]
            self._poll.unregister(fd)

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Timer:
        """Calls `callback` once, after `seconds`."""
        timer = Timer(time.monotonic() + seconds, callback)
        heapq.heappush(self._timers, timer)
        return timer

    def on_child(self, pid: int, callback: Callable[[int], None]) -> None:
        """Calls `callback` once, with the exit code of a child process when it has ended (128 + n for signal n)."""
        self._children[pid] = callback

    def on_signals(self, numbers: Iterable[int], callback: Callable[[int], None]) -> None:
        """Calls `callback` with the number of each of these signals. Ignored signals stay ignored (nohup)."""
        for number in numbers:
            if signal.getsignal(number) != signal.SIG_IGN:
                self._signals[number] = callback
                self._install_handler(number)

    def run_until(self, finished: Callable[[], bool]) -> None:
        """Serves events until `finished` returns true."""
        while not finished():
            self.step()

    def step(self) -> None:
        """Waits, without a time limit, for the next event or timer, and calls back for all that are due."""
        self._new.clear()
        for fd, event in self._poll.poll(self._wait_ms()):
            for wanted in (READ, WRITE):
                if fd in self._new:
                    break  # an earlier callback closed this descriptor, and its number belongs to another now
                callback = self._watched.get(fd, {}).get(wanted)
                if callback and event & (wanted | _GONE):
                    callback()
        now = time.monotonic()
        while self._timers and self._timers[0].when <= now:
            due = heapq.heappop(self._timers).callback
            if due:
                due()

    def _wait_ms(self) -> int | None:
        while self._timers and self._timers[0].callback is None:
            heapq.heappop(self._timers)
        if not self._timers:
            return None
        return max(0, int((self._timers[0].when - time.monotonic()) * 1000) + 1)

    def _install_handler(self, number: int) -> None:
        """Replaces the handler of a signal by one that only wakes the loop. `close` restores it."""
        if number not in self._old_handlers:
            self._old_handlers[number] = signal.signal(number, lambda *_: None)

    def _on_wakeup(self) -> None:
        try:
            numbers = os.read(self._wake_read, 4096)
        except BlockingIOError:
            return
        for number in numbers:
            if number in self._signals:
                self._signals[number](number)
        self._reap()

    def _reap(self) -> None:
        for pid in list(self._children):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                self._children.pop(pid)(to_exit_code(status))


def to_exit_code(status: int) -> int:
    """Converts a wait status to an exit code as a shell does: 128 + n for signal n."""
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code
