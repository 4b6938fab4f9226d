"""Looks names up beside the loop: getaddrinfo blocks, for tens of seconds where a name server is slow or gone.

A few threads of the lowest kind: importing concurrent.futures would cost more than most lookups.
"""

from __future__ import annotations

import _thread
import os
from collections import deque

from shoal_toolkit.hosts.wire import addresses
from shoal_toolkit.light_typing import Any, Protocol
from shoal_toolkit.system.loop import READ, Loop

Address = tuple[int, tuple[Any, ...]]  # family, address


class Answer(Protocol):
    """Gets the addresses of a host, or the OSError that says why there are none (yet)."""

    def __call__(self, found: list[Address] | OSError, /) -> None: ...


_THREADS = 16  # hundreds of hosts are asked for at once


class Resolver:
    """Asks for addresses, and calls back from the loop."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._asked: deque[tuple[str, int, Answer]] = deque()
        self._found: deque[tuple[Answer, list[Address] | OSError]] = deque()
        self._threads = 0
        self._lock = _thread.allocate_lock()
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        loop.watch(self._read, READ, self._answer)

    def ask(self, host: str, port: int, answer: Answer) -> None:
        """Look a name up; `answer` gets its addresses, or the OSError that says why there are none (yet)."""
        with self._lock:
            self._asked.append((host, port, answer))
            if self._threads < _THREADS:
                self._threads += 1
                _thread.start_new_thread(self._work, ())

    def close(self) -> None:
        """Call nobody back any more. A thread that still waits for a name server ends with the process."""
        self._loop.unwatch(self._read, READ)
        with self._lock:
            self._asked.clear()

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._asked:
                    self._threads -= 1
                    return
                host, port, answer = self._asked.popleft()
            self._found.append((answer, _look_up(host, port)))
            os.write(self._write, b".")

    def _answer(self) -> None:
        os.read(self._read, 4096)
        while self._found:
            answer, found = self._found.popleft()
            answer(found)


def _look_up(host: str, port: int) -> list[Address] | OSError:
    try:
        return addresses(host, port)
    except OSError as error:
        return error
    except UnicodeError as error:
        return OSError(f"no host name ({error})")
