"""Looks up host names in threads: getaddrinfo blocks, for tens of seconds if a name server is slow or gone.

It uses the module _thread: importing concurrent.futures would take longer than most lookups.
"""

from __future__ import annotations

import _thread
import os
from collections import deque

from shoal_toolkit.fast_typing import Any, Protocol
from shoal_toolkit.hosts.wire import look_up_host
from shoal_toolkit.system.loop import READ, Loop

Address = tuple[int, tuple[Any, ...]]  # family, address


class OnResolved(Protocol):
    """Called with the addresses of a host, or the OSError that explains why there are none."""

    def __call__(self, found: list[Address] | OSError, /) -> None: ...


_THREADS = 16  # hundreds of hosts may be looked up at once


class Resolver:
    """Looks up hosts in at most 16 threads, and calls back from the loop."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._queue: deque[tuple[str, int, OnResolved]] = deque()
        self._found: deque[tuple[OnResolved, list[Address] | OSError]] = deque()
        self._threads = 0
        self._lock = _thread.allocate_lock()
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        loop.watch(self._read, READ, self._on_found)

    def look_up(self, host: str, port: int, on_resolved: OnResolved) -> None:
        """Starts to look up a host in a thread. The loop calls `on_resolved` later, also for an error."""
        with self._lock:
            self._queue.append((host, port, on_resolved))
            if self._threads < _THREADS:
                self._threads += 1
                _thread.start_new_thread(self._run_lookups, ())

    def close(self) -> None:
        """Stops calling back. Threads that wait for a name server end with the process."""
        self._loop.unwatch(self._read, READ)
        with self._lock:
            self._queue.clear()

    def _run_lookups(self) -> None:
        """Body of a thread: looks up the queued hosts, and ends when there are none."""
        while True:
            with self._lock:
                if not self._queue:
                    self._threads -= 1
                    return
                host, port, on_resolved = self._queue.popleft()
            self._found.append((on_resolved, _try_look_up(host, port)))
            os.write(self._write, b".")

    def _on_found(self) -> None:
        os.read(self._read, 4096)
        while self._found:
            on_resolved, found = self._found.popleft()
            on_resolved(found)


def _try_look_up(host: str, port: int) -> list[Address] | OSError:
    try:
        return look_up_host(host, port)
    except OSError as error:
        return error
    except UnicodeError as error:
        return OSError(f"not a host name ({error})")
