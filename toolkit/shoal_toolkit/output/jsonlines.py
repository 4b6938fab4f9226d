"""The log as JSON: one object a line, of `train` and of ranks alike (SHOAL_LOG_FORMAT=json).

{"time": "2026-01-31T12:00:00.123Z", "host": "algo-1", "rank": 0, "stream": "stdout", "message": "epoch 1"}

`rank` is null where `train` itself speaks, or the launcher. Bytes that are no UTF-8 become \\xNN.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from json.encoder import encode_basestring

from shoal_toolkit.output.streams import TextLines

STREAMS = {1: "stdout", 2: "stderr"}


def now() -> str:
    """Return the time, UTC, to the millisecond."""
    moment = time.time()
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(moment))}.{int(moment % 1 * 1000):03d}Z"


def head(host: str, rank: int | None, stream: int) -> str:
    """Return the start of an object, up to its message."""
    fields = {"time": now(), "host": host, "rank": rank, "stream": STREAMS[stream]}
    return f'{json.dumps(fields, ensure_ascii=False)[:-1]}, "message": '


def encode(start: str, messages: Iterable[str]) -> bytes:
    """Return an object for each message."""
    lines = [f"{start}{encode_basestring(message)}}}\n" for message in messages]
    return "".join(lines).encode("utf-8", "backslashreplace")


class JsonLines:
    """Turns one stream of a rank, or of the launcher, into objects."""

    def __init__(self, host: str, rank: int | None, stream: int) -> None:
        self._of = (host, rank, stream)
        self._lines = TextLines()

    def feed(self, data: bytes) -> bytes:
        """Return the lines that are complete now."""
        return self._objects(self._lines.feed(data))

    def flush(self) -> bytes:
        """Return what is left, as a line."""
        return self._objects(self._lines.flush())

    def _objects(self, lines: list[str]) -> bytes:
        return encode(head(*self._of), lines) if lines else b""
