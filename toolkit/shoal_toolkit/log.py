"""The log lines of `train` itself, on stderr: the script's stdout stays the script's. Secrets are masked.

With SHOAL_LOG_FORMAT=json each line is an object. The output of ranks has the same form (output/lines.py):

{"time": "2026-01-31T12:00:00.123Z", "host": "algo-1", "rank": 0, "stream": "stdout", "message": "epoch 1"}

`rank` is null for lines of `train` and of the launcher. Bytes that are not UTF-8 become \\xNN.

Inside `shoal run` all output is events on stdout, each with output of any length (docs/decisions/events-of-train.md):

{"shoal_event": "output", "host": "algo-1", "rank": 0, "stream": 1, "form": "plain", "text": "epoch 1\\nepoch 2\\nepo"}
{"shoal_event": "log", "host": "algo-1", "rank": null, "stream": 2, "form": "plain", "text": "train: restart 1 ..."}
{"shoal_event": "metric", "host": "algo-1", "rank": 0, "name": "loss", "value": 0.25, "time": ...}
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from json.encoder import encode_basestring, encode_basestring_ascii

from shoal_toolkit import redact
from shoal_toolkit.fast_typing import Any

STDOUT, STDERR = 1, 2
PLAIN, PREFIXED, JSON = "plain", "prefixed", "json"  # the form that `shoal run` gives the lines of an event
_MAX_EVENT = 1 << 16  # bytes of output; an escape takes six characters, and `shoal run` splits lines of more than 1 MiB
_STREAM_NAMES = {STDOUT: "stdout", STDERR: "stderr"}

_host = ""
_as_json = _as_events = False
_writer: Callable[[bytes], None] | None = None


def configure_log(host: str, as_json: bool, as_events: bool = False) -> None:
    """Sets the host and the format of all later log lines."""
    global _host, _as_json, _as_events
    _host, _as_json, _as_events = host, as_json, as_events


def set_log_writer(writer: Callable[[bytes], None] | None) -> None:
    """Sends later log lines to `writer`, which keeps their order with other output; None: directly to the log."""
    global _writer
    _writer = writer


def write_log(text: str) -> None:
    """Writes a message to the log, with masked secrets, each of its lines with the prefix `train: `.

    Nothing is buffered, so that a fork writes nothing twice. If a log writer is set, it gets the lines.
    """
    lines = [f"train: {clean_line(line)}" for line in redact.mask_text(text).splitlines()]
    if _as_json and not _as_events:
        data = format_json_lines(_host, None, STDERR, lines)
    else:
        data = "".join(f"{line}\n" for line in lines).encode("utf-8", "backslashreplace")
        if _as_events:
            data = format_events(begin_event("log", _host, None, STDERR, JSON if _as_json else PLAIN), data)
    (_writer or _write_directly)(data)


def write_event(kind: str, fields: Mapping[str, Any]) -> None:
    """Tells `shoal run` something that is not output. Outside of it, this does nothing."""
    if _as_events:
        (_writer or _write_directly)(f"{json.dumps({'shoal_event': kind, **fields})}\n".encode())


def clean_line(line: str) -> str:
    """Returns a line without characters that control a terminal or hide text. Names and failures may come from others.

    A lone surrogate, which stands for a byte that is not UTF-8, is written as an escape later.
    """
    return line if line.isprintable() else "".join(map(_clean_char, line))


def _clean_char(char: str) -> str:
    if char.isprintable() or "\ud800" <= char <= "\udfff":
        return char
    return " " if char.isspace() else "\N{REPLACEMENT CHARACTER}"


def format_json_lines(host: str, rank: int | None, stream: int, messages: Iterable[str]) -> bytes:
    """Returns one JSON object per message, each on a line of its own.

    Args:
        host: The host that wrote the messages.
        rank: The rank that wrote them, None for `train` and the launcher.
        stream: 1 for stdout, 2 for stderr.
        messages: Lines without their ends.
    """
    fields = {"time": format_time(), "host": host, "rank": rank, "stream": _STREAM_NAMES[stream]}
    start = f'{json.dumps(fields, ensure_ascii=False)[:-1]}, "message": '
    lines = (f"{start}{encode_basestring(message)}}}\n" for message in messages)
    return "".join(lines).encode("utf-8", "backslashreplace")


def begin_event(kind: str, host: str, rank: int | None, stream: int, form: str) -> str:
    """Returns the beginning of all events with output of one stream."""
    fields = {"shoal_event": kind, "host": host, "rank": rank, "stream": stream, "form": form}
    return f'{json.dumps(fields)[:-1]}, "text": '


def format_events(start: str, data: bytes) -> bytes:
    """Returns events with output. Bytes that are not UTF-8 become lone surrogates, as in Python's file names."""
    pieces = (data[at : at + _MAX_EVENT].decode("utf-8", "surrogateescape") for at in range(0, len(data), _MAX_EVENT))
    return "".join(f"{start}{encode_basestring_ascii(piece)}}}\n" for piece in pieces).encode()


def format_time() -> str:
    """Returns the current time in UTC, to the millisecond, such as 2026-01-31T12:00:00.123Z."""
    now = time.time()
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(now))}.{int(now % 1 * 1000):03d}Z"


def _write_directly(data: bytes) -> None:
    try:
        while data:
            data = data[os.write(STDOUT if _as_events else STDERR, data) :]
    except OSError:
        return  # it is closed
