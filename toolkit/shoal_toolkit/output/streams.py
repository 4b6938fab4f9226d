"""Output of the ranks on its way to a descriptor: whole lines, marked, in linear time, the last of them kept.

Bytes stay as they are: nothing here decodes, and a mark goes in only where a line or a progress bar's piece begins.
"""

from __future__ import annotations

import os
import re
import stat
from collections import deque
from collections.abc import Callable, Sequence

from shoal_toolkit.light_typing import Protocol
from shoal_toolkit.log import say
from shoal_toolkit.system.loop import READ, WRITE, Loop, Timer

CHUNK = 65536  # what a pipe holds; a larger buffer comes from mmap, at ten times the cost of a read
_PIECE = 4096  # PIPE_BUF: a pipe that polls as writable takes that much without blocking
_FULL = 1 << 20
_TAIL = 16384
# A source that had little to give rests for a moment, while its pipe fills: waking up for every line of a script that
# writes each on its own would cost a core that the script itself needs. Nobody sees the delay.
_REST_SECONDS = 0.001
_LARGE = 1 << 20  # what a user without privileges may ask of a pipe
_F_SETPIPE_SZ = 1031  # fcntl has the name since Python 3.10
_MOST_AT_ONCE = 64


class Tail:
    """The last bytes of a stream."""

    def __init__(self, size: int = _TAIL) -> None:
        self._chunks: deque[bytes] = deque()
        self._held = 0
        self._size = size

    def add(self, data: bytes) -> None:
        kept = data[-self._size :]
        self._chunks.append(kept)
        self._held += len(kept)
        while self._held - len(self._chunks[0]) >= self._size:
            self._held -= len(self._chunks.popleft())

    def text(self) -> str:
        return b"".join(self._chunks)[-self._size :].decode("utf-8", "replace")


class Lines:
    """Turns pieces of a stream into whole lines with a mark; a progress bar's \\r ends a piece like a line."""

    def __init__(self, mark: bytes) -> None:
        self._mark = mark
        self._partial: list[bytes] = []
        self._held = 0
        self._returned = False  # the last piece ended with \\r

    def feed(self, data: bytes) -> bytes:
        """Return the lines that are complete now."""
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if not end:
            self._partial.append(data)
            self._held += len(data)
            # A line without an end must not grow for ever.
            return self.flush() if self._held > _FULL else b""
        whole = b"".join((*self._partial, data[:end])) if self._partial else data[:end]
        self._partial = [data[end:]] if end < len(data) else []
        self._held = len(data) - end
        return self._marked(whole) if self._mark else whole

    def flush(self) -> bytes:
        """Return what is left, as a line."""
        left = b"".join(self._partial)
        self._partial, self._held = [], 0
        return self._marked(left + b"\n") if left else b""

    def _marked(self, whole: bytes) -> bytes:
        mark, before = self._mark, b""
        if self._returned and whole.startswith(b"\n"):
            before, whole = whole[:1], whole[1:]  # the other half of \\r\\n
        self._returned = whole.endswith(b"\r")
        if not whole:
            return before
        if b"\r" in whole:
            whole = re.sub(rb"\r(?=[^\n])", lambda _: b"\r" + mark, whole)
        return before + mark + whole[:-1].replace(b"\n", b"\n" + mark) + whole[-1:]


class TextLines:
    """Turns pieces of a stream into the texts of its lines, for those who read them. \\r separates like \\n."""

    def __init__(self) -> None:
        self._lines = Lines(b"")
        self._returned = False  # the last line ended with \\r

    def feed(self, data: bytes) -> list[str]:
        """Return the lines that are complete now."""
        return self._texts(self._lines.feed(data))

    def flush(self) -> list[str]:
        """Return what is left, as a line."""
        return self._texts(self._lines.flush())

    def _texts(self, whole: bytes) -> list[str]:
        if not whole:
            return []
        if self._returned and whole.startswith(b"\n"):
            whole = whole[1:]  # the other half of \\r\\n
        self._returned = whole.endswith(b"\r")
        text = whole.decode("utf-8", "backslashreplace").replace("\r\n", "\n")
        lines = text.split("\n")
        if not lines[-1]:
            lines.pop()
        if "\r" not in text:
            return lines
        return [piece for line in lines for piece in line.split("\r") if piece or not line]


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
        self._opened: int | None = None  # a description of our own; -1 where there can be none
        self.last = b"\n"  # the last byte that was given

    def write(self, data: bytes) -> None:
        if not data or self._broken:
            return
        self.last = data[-1:]
        if not self._waiting:
            data = data[self._put([data]) :]
            if not data or self._broken:
                return
            self._loop.watch(self._fd, WRITE, self._writable)
        self._waiting.append(memoryview(data))
        self._held += len(data)
        self._flow.report(self, self._held)

    @property
    def empty(self) -> bool:
        """Whether everything has been written."""
        return not self._waiting

    def drop(self) -> None:
        """Give up what waits, and whatever comes."""
        self._clear()
        self._broken = True

    def close(self) -> None:
        """Write what waits, for as long as it takes, and give up the description."""
        for data in self._waiting:
            _write_all(self._fd, data)
        self._clear()
        if self._opened is not None and self._opened not in (-1, self._fd):
            os.close(self._opened)
        self._opened = -1

    def _writable(self) -> None:
        if self._descriptor() < 0:
            # Shared and blocking: it takes one piece without blocking, and has to be asked again.
            written = self._try(self._fd, [self._waiting[0][:_PIECE]])
        else:
            written = self._put([self._waiting[index] for index in range(min(len(self._waiting), _MOST_AT_ONCE))])
        self._held -= written
        while written:
            first = self._waiting.popleft()
            if written < len(first):
                self._waiting.appendleft(first[written:])
            written -= min(written, len(first))
        if not self._waiting:
            self._loop.unwatch(self._fd, WRITE)
        self._flow.report(self, self._held)

    def _put(self, pieces: Sequence[bytes | memoryview]) -> int:
        """Write what can be written now; returns how many bytes that were."""
        fd = self._descriptor()
        return self._try(fd, pieces) if fd >= 0 else 0

    def _try(self, fd: int, pieces: Sequence[bytes | memoryview]) -> int:
        try:
            return os.writev(fd, pieces)
        except BlockingIOError:
            return 0
        except OSError as error:
            # Whoever read our output is gone. The job goes on; its result is in the files and the exit code.
            self._broken = True
            self._clear()
            say(f"descriptor {self._fd} cannot be written any more ({error.strerror}): the output from now on is lost")
            return 0

    def _clear(self) -> None:
        if self._waiting:
            self._loop.unwatch(self._fd, WRITE)
        self._waiting.clear()
        self._held = 0
        self._flow.report(self, 0)

    def _descriptor(self) -> int:
        """Return what can be written to without blocking; -1 where that is not known beforehand."""
        if self._opened is None:
            self._opened = _reopen(self._fd)
        return self._opened


def _write_all(fd: int, data: memoryview) -> None:
    try:
        while data:
            data = data[os.write(fd, data) :]
    except OSError:
        return  # nobody reads it


def _reopen(fd: int) -> int:
    """Open what a descriptor of ours refers to anew, and non-blocking. A file never blocks: it stays as it is.

    Returns -1 where it cannot be opened: a socket, or a pipe of another user.
    """
    try:
        if stat.S_ISREG(os.fstat(fd).st_mode):
            return fd
        return os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError:
        return -1


class Source:
    """Reads a pipe or FIFO into a callback until its end."""

    def __init__(self, loop: Loop, flow: Flow, fd: int, on_data: Callable[[bytes], None]) -> None:
        os.set_blocking(fd, False)
        self._loop = loop
        self._flow = flow
        self._fd = fd
        self._on_data = on_data
        self._paused = False
        self._rests: Timer | None = None
        self._little = 0  # known when the first bytes have come
        loop.watch(fd, READ, self._readable)
        flow.add(self)

    def poll(self) -> None:
        """Read what is there now, and no more than a pipe holds: somebody may write for ever."""
        left = _LARGE
        while left > 0 and (size := self._read()):
            left -= size

    def pause(self) -> None:
        self._paused = True
        self._loop.unwatch(self._fd, READ)

    def resume(self) -> None:
        self._paused = False
        self._watch()

    def finish(self) -> None:
        """Read what is there now, and close: whoever wrote has ended."""
        self.poll()
        self._close()

    def _readable(self) -> None:
        size = self._read()
        if not size or self._fd < 0:
            return
        if not self._little:
            self._little = CHUNK if _enlarge(self._fd) else _PIECE
        if size < self._little and self._rests is None:
            self._loop.unwatch(self._fd, READ)
            self._rests = self._loop.call_later(_REST_SECONDS, self._rested)

    def _rested(self) -> None:
        self._rests = None
        self._watch()

    def _watch(self) -> None:
        if self._fd >= 0 and not self._paused and self._rests is None:
            self._loop.watch(self._fd, READ, self._readable)

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


def _enlarge(fd: int) -> bool:
    """Let a pipe hold more, so that its writer goes on while we rest; returns whether it may."""
    import fcntl

    try:
        return fcntl.fcntl(fd, _F_SETPIPE_SZ, _LARGE) >= _LARGE
    except OSError:
        return False
