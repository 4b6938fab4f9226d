"""Output of the ranks on its way to a descriptor: whole lines, marked, in linear time, the last of them kept."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from typing import Protocol

from shoal_toolkit.log import say
from shoal_toolkit.loop import READ, WRITE, Loop

CHUNK = 65536
_PIECE = 4096  # PIPE_BUF: a pipe that polls as writable takes that much without blocking
_FULL = 1 << 20
_TAIL = 16384


class Tail:
    """The last bytes of a stream."""

    def __init__(self, size: int = _TAIL) -> None:
        self._chunks: deque[bytes] = deque()
        self._held = 0
        self._size = size

    def add(self, data: bytes) -> None:
        self._chunks.append(data)
        self._held += len(data)
        while self._held - len(self._chunks[0]) >= self._size:
            self._held -= len(self._chunks.popleft())

    def text(self) -> str:
        return b"".join(self._chunks)[-self._size :].decode("utf-8", "replace")


class Lines:
    """Turns pieces of a stream into whole lines with a mark; a progress bar's \\r releases a line as well."""

    def __init__(self, mark: bytes) -> None:
        self._mark = mark
        self._partial: list[bytes] = []
        self._held = 0

    def feed(self, data: bytes) -> bytes:
        """Return the lines that are complete now."""
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if not end:
            self._partial.append(data)
            self._held += len(data)
            # A line without an end must not grow for ever.
            return self.flush() if self._held > _FULL else b""
        whole = b"".join((*self._partial, data[:end]))
        self._partial = [data[end:]] if end < len(data) else []
        self._held = len(data) - end
        return self._marked(whole)

    def flush(self) -> bytes:
        """Return what is left, as a line."""
        left = b"".join(self._partial)
        self._partial, self._held = [], 0
        return self._marked(left + b"\n") if left else b""

    def _marked(self, whole: bytes) -> bytes:
        if not self._mark:
            return whole
        body, last = whole[:-1], whole[-1:]
        return self._mark + body.replace(b"\n", b"\n" + self._mark) + last


class Pausable(Protocol):
    """Something that reads, and can be told to wait."""

    def pause(self) -> None: ...
    def resume(self) -> None: ...


class Flow:
    """Stops the sources while what they feed is full: memory stays bounded, and no writer ever blocks the loop."""

    def __init__(self) -> None:
        self._sources: set[Pausable] = set()
        self._full: set[object] = set()

    def add(self, source: Pausable) -> None:
        self._sources.add(source)
        if self._full:
            source.pause()

    def remove(self, source: Pausable) -> None:
        self._sources.discard(source)

    def report(self, sink: object, held: int) -> None:
        """A sink says how many bytes wait in it."""
        was_full = bool(self._full)
        if held > _FULL:
            self._full.add(sink)
        elif held < _FULL // 2:
            self._full.discard(sink)
        if was_full != bool(self._full):
            for source in list(self._sources):
                if self._full:
                    source.pause()
                else:
                    source.resume()


class Sink:
    """Writes to one of our descriptors without blocking the loop or changing its flags (others share it)."""

    def __init__(self, loop: Loop, fd: int, flow: Flow) -> None:
        self._loop = loop
        self._fd = fd
        self._flow = flow
        self._waiting: deque[memoryview] = deque()
        self._held = 0
        self._broken = False

    def write(self, data: bytes) -> None:
        if not data or self._broken:
            return
        if not self._waiting:
            self._loop.watch(self._fd, WRITE, self._writable)
        self._waiting.append(memoryview(data))
        self._held += len(data)
        self._flow.report(self, self._held)

    @property
    def empty(self) -> bool:
        """Whether everything has been written."""
        return not self._waiting

    def _writable(self) -> None:
        self._put()
        self._flow.report(self, self._held)

    def _put(self) -> None:
        first = self._waiting[0]
        try:
            written = os.write(self._fd, first[:_PIECE])
        except BlockingIOError:  # somebody else made the descriptor non-blocking
            return
        except OSError:
            # Whoever read our output is gone. The job goes on; its verdict is in the files and the exit code.
            say(f"nobody reads descriptor {self._fd} any more: what is written there from now on is lost")
            self._broken = True
            written = 0
            self._waiting.clear()
            self._held = 0
        if written:
            self._held -= written
            self._waiting[0] = first[written:]
            if written == len(first):
                self._waiting.popleft()
        if not self._waiting:
            self._loop.unwatch(self._fd, WRITE)


class Source:
    """Reads a pipe or FIFO into a callback until its end."""

    def __init__(self, loop: Loop, flow: Flow, fd: int, on_data: Callable[[bytes], None]) -> None:
        os.set_blocking(fd, False)
        self._loop = loop
        self._flow = flow
        self._fd = fd
        self._on_data = on_data
        loop.watch(fd, READ, self.poll)
        flow.add(self)

    def poll(self) -> None:
        """Read what is there now."""
        self._read()

    def pause(self) -> None:
        self._loop.unwatch(self._fd, READ)

    def resume(self) -> None:
        self._loop.watch(self._fd, READ, self.poll)

    def finish(self) -> None:
        """Read what is there now, and close: whoever wrote has ended.

        No more than a pipe holds: what the script left behind, in a session of its own, may write for ever.
        """
        left = _FULL
        while left > 0 and (size := self._read()):
            left -= size
        self._close()

    def _read(self) -> int:
        """Hand on what is there now; returns how many bytes that were."""
        if self._fd < 0:
            return 0
        try:
            data = os.read(self._fd, CHUNK)
        except BlockingIOError:
            return 0
        if data:
            self._on_data(data)
        else:
            self._close()
        return len(data)

    def _close(self) -> None:
        if self._fd >= 0:
            self._loop.unwatch(self._fd, READ)
            self._flow.remove(self)
            os.close(self._fd)
            self._fd = -1
