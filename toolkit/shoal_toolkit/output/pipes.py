"""Moves output from pipes to the descriptors of `train`, without blocking the event loop and in bounded memory."""

from __future__ import annotations

import fcntl
import os
import stat
from collections import deque
from collections.abc import Callable, Sequence

from shoal_toolkit.fast_typing import Protocol
from shoal_toolkit.log import write_log
from shoal_toolkit.system.loop import READ, WRITE, Loop, Timer

CHUNK = 65536  # bytes in a pipe by default; Python allocates larger buffers by mmap, at ten times the cost of a read
_PIPE_BUF = 4096  # a pipe that polls as writable takes this many bytes without blocking
_FULL = 1 << 20  # bytes waiting in a sink
# A source that had little to read pauses while its pipe fills. Waking up for each line of a script would cost a core
# that the script itself needs. The delay is too short to notice.
_PAUSE_SECONDS = 0.001
_LARGE_PIPE = 1 << 20  # bytes; unprivileged users may set a pipe to this size
_F_SETPIPE_SZ = 1031  # in the module fcntl since Python 3.10
_MAX_PIECES = 64  # written by one call


class Pausable(Protocol):
    """A reader that can be paused."""

    def pause(self) -> None: ...
    def resume(self) -> None: ...


class FlowControl:
    """Pauses all sources while more than 1 MiB waits in a sink. This bounds memory, and no write blocks the loop."""

    def __init__(self) -> None:
        self._sources: set[Pausable] = set()
        self._full: set[object] = set()

    def add(self, source: Pausable) -> None:
        """Adds a source. It is paused at once if a sink is full."""
        self._sources.add(source)
        if self._full:
            source.pause()

    def remove(self, source: Pausable) -> None:
        self._sources.discard(source)

    def report(self, sink: object, held: int) -> None:
        """Notes how many bytes wait in a sink; pauses all sources above 1 MiB, and resumes them below half of that."""
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
    """Writes to stdout or stderr without blocking. The flags of the descriptor stay: other processes share it."""

    def __init__(self, loop: Loop, fd: int, flow: FlowControl) -> None:
        self._loop = loop
        self._fd = fd
        self._flow = flow
        self._waiting: deque[memoryview] = deque()
        self._held = 0
        self._broken = False
        self._opened: int | None = None  # the non-blocking descriptor; -1 if there can't be one
        self.last = b"\n"  # the last byte that was passed to `write`

    def write(self, data: bytes) -> None:
        """Writes as much as the descriptor takes now, and queues the rest. Does nothing once the reader is gone."""
        if not data or self._broken:
            return
        self.last = data[-1:]
        if not self._waiting:
            data = data[self._write_now([data]) :]
            if not data or self._broken:
                return
            self._loop.watch(self._fd, WRITE, self._on_writable)
        self._waiting.append(memoryview(data))
        self._held += len(data)
        self._flow.report(self, self._held)

    @property
    def empty(self) -> bool:
        """Whether everything has been written."""
        return not self._waiting

    def drop(self) -> None:
        """Discards what is queued, and all later output."""
        self._clear()
        self._broken = True

    def close(self) -> None:
        """Writes all queued output, blocking as long as that takes, and closes the non-blocking descriptor."""
        try:
            for data in self._waiting:
                while data:
                    data = data[os.write(self._fd, data) :]
        except OSError:
            pass  # its reader has gone
        self._clear()
        if self._opened is not None and self._opened not in (-1, self._fd):
            os.close(self._opened)
        self._opened = -1

    def _on_writable(self) -> None:
        """Writes a part of the queue, stops watching the descriptor when nothing is left, and reports what is held."""
        if self._descriptor() < 0:
            # A shared, blocking descriptor takes one piece without blocking; then it is polled again.
            written = self._try_write(self._fd, [self._waiting[0][:_PIPE_BUF]])
        else:
            written = self._write_now([self._waiting[index] for index in range(min(len(self._waiting), _MAX_PIECES))])
        self._held -= written
        while written:
            first = self._waiting.popleft()
            if written < len(first):
                self._waiting.appendleft(first[written:])
            written -= min(written, len(first))
        if not self._waiting:
            self._loop.unwatch(self._fd, WRITE)
        self._flow.report(self, self._held)

    def _write_now(self, pieces: Sequence[bytes | memoryview]) -> int:
        fd = self._descriptor()
        return self._try_write(fd, pieces) if fd >= 0 else 0

    def _try_write(self, fd: int, pieces: Sequence[bytes | memoryview]) -> int:
        try:
            return os.writev(fd, pieces)
        except BlockingIOError:
            return 0
        except OSError as error:
            # The reader of the log is gone. The job goes on: its result is in the files and the exit code.
            self._broken = True
            self._clear()
            write_log(f"descriptor {self._fd} cannot be written any more ({error.strerror}): later output is lost")
            return 0

    def _clear(self) -> None:
        """Discards the queue, and lets paused sources go on."""
        if self._waiting:
            self._loop.unwatch(self._fd, WRITE)
        self._waiting.clear()
        self._held = 0
        self._flow.report(self, 0)

    def _descriptor(self) -> int:
        """Returns a descriptor that writes don't block on; -1 if there is none."""
        if self._opened is None:
            self._opened = _reopen_nonblocking(self._fd)
        return self._opened


def _reopen_nonblocking(fd: int) -> int:
    """Opens the file again, non-blocking. Returns -1 if it can't be opened: a socket, or another user's pipe."""
    try:
        if stat.S_ISREG(os.fstat(fd).st_mode):
            return fd
        return os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError:
        return -1


class Source:
    """Reads a pipe or FIFO to its end, passes the bytes to `on_data`, and closes it.

    Creating it makes the descriptor non-blocking, and adds it to the flow control.
    """

    def __init__(self, loop: Loop, flow: FlowControl, fd: int, on_data: Callable[[bytes], None]) -> None:
        os.set_blocking(fd, False)
        self._loop = loop
        self._flow = flow
        self._fd = fd
        self._on_data = on_data
        self._paused = False
        self._pause: Timer | None = None
        self._little = 0  # bytes; a smaller read is followed by a pause. Set by the first read.
        loop.watch(fd, READ, self._on_readable)
        flow.add(self)

    def poll(self) -> None:
        """Reads the available bytes, but at most as many as a pipe holds: a process may never stop writing."""
        left = _LARGE_PIPE
        while left > 0 and (size := self._read()):
            left -= size

    def pause(self) -> None:
        """Stops reading until `resume`. The writer of the pipe waits when it is full."""
        self._paused = True
        self._loop.unwatch(self._fd, READ)

    def resume(self) -> None:
        self._paused = False
        self._watch()

    def finish(self) -> None:
        """Reads the available bytes, at most 1 MiB, and closes the pipe: its writers have ended."""
        self.poll()
        self._close()

    def _on_readable(self) -> None:
        """Reads once. After a small read, the pipe is not watched for 1 ms. The first read enlarges the pipe."""
        size = self._read()
        if not size or self._fd < 0:
            return
        if not self._little:
            self._little = CHUNK if _enlarge_pipe(self._fd) else _PIPE_BUF
        if size < self._little and self._pause is None:
            self._loop.unwatch(self._fd, READ)
            self._pause = self._loop.call_later(_PAUSE_SECONDS, self._end_pause)

    def _end_pause(self) -> None:
        self._pause = None
        self._watch()

    def _watch(self) -> None:
        if self._fd >= 0 and not self._paused and self._pause is None:
            self._loop.watch(self._fd, READ, self._on_readable)

    def _read(self) -> int:
        """Passes on the available bytes, at most 64 KiB, and returns their number. Closes the pipe at its end."""
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


def _enlarge_pipe(fd: int) -> bool:
    """Enlarges a pipe, so that its writer goes on during pauses; returns whether that worked."""
    try:
        return fcntl.fcntl(fd, _F_SETPIPE_SZ, _LARGE_PIPE) >= _LARGE_PIPE
    except OSError:
        return False
