"""Splits streams of bytes into lines, in linear time: with a prefix, as text, as JSON objects, or only the last ones.

Bytes are never changed. A prefix is added where a line, or a piece of a progress bar, begins. A line end is added to an
incomplete last line, and to a piece of more than 1 MiB without one.
"""

from __future__ import annotations

import re
from collections import deque

from shoal_toolkit.log import begin_event, format_events, format_json_lines

_MAX_LINE_BYTES = 1 << 20
_TAIL_BYTES = 16384


class Tail:
    """Keeps the last `size` bytes of a stream."""

    def __init__(self, size: int = _TAIL_BYTES) -> None:
        self._chunks: deque[bytes] = deque()
        self._held = 0
        self._size = size

    def add(self, data: bytes) -> None:
        """Adds output, and drops the oldest pieces while the others have `size` bytes."""
        kept = data[-self._size :]
        self._chunks.append(kept)
        self._held += len(kept)
        while self._held - len(self._chunks[0]) >= self._size:
            self._held -= len(self._chunks.popleft())

    def clear(self) -> None:
        self._chunks.clear()
        self._held = 0

    def text(self) -> str:
        """Returns the kept bytes as text, with replacement characters for bytes that are not UTF-8."""
        return b"".join(self._chunks)[-self._size :].decode("utf-8", "replace")


class Lines:
    """Turns chunks of a stream into whole lines with a prefix. A carriage return ends a piece of a line, like \\n."""

    def __init__(self, prefix: bytes) -> None:
        self._prefix = prefix
        self._partial: list[bytes] = []
        self._held = 0
        self._after_return = False  # the last piece ended with \\r

    def feed(self, data: bytes) -> bytes:
        """Returns the lines that are complete now, and keeps the rest.

        A rest of more than 1 MiB is ended and returned.
        """
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if not end:
            self._partial.append(data)
            self._held += len(data)
            return self.flush() if self._held > _MAX_LINE_BYTES else b""
        whole = b"".join((*self._partial, data[:end])) if self._partial else data[:end]
        self._partial = [data[end:]] if end < len(data) else []
        self._held = len(data) - end
        return self._add_prefix(whole) if self._prefix else whole

    def flush(self) -> bytes:
        """Returns an incomplete last line, with a line end."""
        rest = b"".join(self._partial)
        self._partial, self._held = [], 0
        return self._add_prefix(rest + b"\n") if rest else b""

    def _add_prefix(self, whole: bytes) -> bytes:
        prefix, before = self._prefix, b""
        if self._after_return and whole.startswith(b"\n"):
            before, whole = whole[:1], whole[1:]  # the second half of \\r\\n
        self._after_return = whole.endswith(b"\r")
        if not whole:
            return before
        if b"\r" in whole:
            whole = re.sub(rb"\r(?=[^\n])", lambda _: b"\r" + prefix, whole)
        return before + prefix + whole[:-1].replace(b"\n", b"\n" + prefix) + whole[-1:]


class TextLines:
    """Turns chunks of a stream into lines of text without their ends. \\r separates lines like \\n.

    Bytes that are not UTF-8 become \\xNN.
    """

    def __init__(self) -> None:
        self._lines = Lines(b"")
        self._after_return = False  # the last line ended with \\r

    def feed(self, data: bytes) -> list[str]:
        """Returns the lines that are complete now."""
        return self._split(self._lines.feed(data))

    def flush(self) -> list[str]:
        """Returns an incomplete last line."""
        return self._split(self._lines.flush())

    def _split(self, whole: bytes) -> list[str]:
        """Returns the lines of a text without their ends. Empty pieces between carriage returns are left out."""
        if not whole:
            return []
        if self._after_return and whole.startswith(b"\n"):
            whole = whole[1:]  # the second half of \\r\\n
        self._after_return = whole.endswith(b"\r")
        text = whole.decode("utf-8", "backslashreplace").replace("\r\n", "\n")
        lines = text.split("\n")
        if not lines[-1]:
            lines.pop()
        if "\r" not in text:
            return lines
        return [piece for line in lines for piece in line.split("\r") if piece or not line]


class JsonLines:
    """Turns one stream of a rank, or of the launcher (rank None), into JSON objects, one for each line."""

    def __init__(self, host: str, rank: int | None, stream: int) -> None:
        self._origin = (host, rank, stream)
        self._lines = TextLines()

    def feed(self, data: bytes) -> bytes:
        """Returns the objects of the lines that are complete now."""
        return self._format(self._lines.feed(data))

    def flush(self) -> bytes:
        """Returns the object of an incomplete last line."""
        return self._format(self._lines.flush())

    def _format(self, lines: list[str]) -> bytes:
        return format_json_lines(*self._origin, lines) if lines else b""


class OutputEvents:
    """Turns one stream of a rank, or of the launcher (rank None), into events of `shoal run`, as it comes."""

    def __init__(self, host: str, rank: int | None, stream: int, form: str) -> None:
        self._start = begin_event("output", host, rank, stream, form)

    def feed(self, data: bytes) -> bytes:
        """Returns events with all of the output."""
        return format_events(self._start, data)

    def flush(self) -> bytes:
        """Returns nothing, as nothing is kept."""
        return b""
