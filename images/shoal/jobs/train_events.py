"""Reads the output of a host: the events of its `train`, and lines of any other program.

Inside `shoal run`, `train` writes all output as events, one JSON object per line (shoal_toolkit/log.py). Their text is
divided into lines here. So no rank or host is read from the text of a line. A script that prints `[5,algo-9] loss=1`
has written a line of its own rank.

Other lines are shown as they are, and belong to the host without a rank. They come from an image without `train` or
with an older one. An event with wrong fields is such a line too: nothing that a job writes is an error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any, NamedTuple

from shoal.clean_text import clean_text
from shoal.docker_client.containers import PieceSplitter, split_pieces
from shoal.jobs.job_log import JobLog, Key, Line
from shoal.limits import MIB

SWITCH = {"SHOAL_LOG_EVENTS": "1"}
"""The variable with which `train` writes events."""
STDOUT, STDERR = 1, 2
_START = '{"shoal_event": "'
_KINDS = ("output", "log")
_PLAIN, _PREFIXED, _JSON = _FORMS = ("plain", "prefixed", "json")
_HOST = re.compile(r"[^\]\s]{1,255}")
_MOST_RANKS = 10**9
_MAX_NAME = 200  # characters of a metric
_NOT_FINITE = ("nan", "inf", "-inf")
_MOST_STREAMS, _MOST_HELD = 4_000, 16 * MIB


class OutputStream(NamedTuple):
    """Where output comes from, and how its lines are shown."""

    host: str
    rank: int | None
    """None: `train`, the launcher or another program wrote it."""
    number: int
    """1 for stdout, 2 for stderr."""
    form: str = _PLAIN
    is_log: bool = False
    """Whether `train` itself wrote it."""


class ShownLine(NamedTuple):
    """A line of the log, and the text that stands for it on a terminal."""

    text: str
    line: Line
    is_overwritten: bool
    """Whether it is a progress bar, which a terminal overwrites by the next line."""


class HostChunk(NamedTuple):
    """Output that has come at once, and the lines that are complete now."""

    stream: OutputStream
    data: bytes
    lines: Sequence[ShownLine]

    def encode(self) -> bytes:
        """Returns the bytes that `train` writes outside of `shoal run`: plain output unchanged."""
        if self.stream.form == _PLAIN:
            return self.data
        ends = ("\r" if line.is_overwritten else "\n" for line in self.lines)
        return "".join(f"{line.text}{end}" for line, end in zip(self.lines, ends)).encode()


@dataclass
class HostOutput:
    """Reads the output of a host, and adds its lines and metrics to the log of the job."""

    host: str
    log: JobLog
    number: int = STDOUT
    """The stream of lines without events: 1 for stdout, 2 for stderr."""
    _splitters: dict[OutputStream, PieceSplitter] = field(default_factory=dict)
    _held: int = 0

    def read(self, chunks: Iterable[bytes]) -> Iterator[HostChunk]:
        """Yields what comes, until its end."""
        foreign = OutputStream(self.host, None, self.number)
        for text, is_overwritten in split_pieces(chunks):
            if not (event := parse_event(text)):
                data = f"{text}\r" if is_overwritten else f"{text}\n"
                yield HostChunk(foreign, data.encode(), self._add(foreign, [(text, is_overwritten)]))
            elif isinstance(event[0], OutputStream):
                yield from self._split(*event)
            else:
                self.log.add_metric(*event)
        yield from self._flush()

    def _split(self, stream: OutputStream, data: bytes) -> Iterator[HostChunk]:
        if stream not in self._splitters:
            self._splitters[stream] = PieceSplitter("backslashreplace" if stream.form == _JSON else "replace")
        splitter = self._splitters[stream]
        before = len(splitter.rest)
        yield HostChunk(stream, data, self._add(stream, splitter.feed(data)))
        self._held += len(splitter.rest) - before
        if self._held > _MOST_HELD or len(self._splitters) > _MOST_STREAMS:  # events may be forged
            yield from self._flush()

    def _flush(self) -> Iterator[HostChunk]:
        """Yields incomplete last lines. Plain output was passed on already."""
        for stream, splitter in self._splitters.items():
            yield HostChunk(stream, b"", self._add(stream, splitter.flush()))
        self._splitters.clear()
        self._held = 0

    def _add(self, stream: OutputStream, pieces: Iterable[tuple[str, bool]]) -> list[ShownLine]:
        if stream.form == _JSON:
            pieces = [(text, False) for text, is_overwritten in pieces if text or not is_overwritten]
        prefix = f"[{stream.rank},{stream.host}] " if stream.form == _PREFIXED and stream.rank is not None else ""
        lines = []
        for text, is_overwritten in pieces:
            shown = _format_json(stream, text) if stream.form == _JSON else prefix + text
            line = self.log.add(self.host, text, stream.host, stream.rank, shown, has_metrics=not stream.is_log)
            lines.append(ShownLine(shown, line, is_overwritten))
        return lines


def _format_json(stream: OutputStream, text: str) -> str:
    """Returns a line as `train` writes it with SHOAL_LOG_FORMAT=json."""
    now = datetime.now(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    name = "stdout" if stream.number == STDOUT else "stderr"
    fields = {"time": now, "host": stream.host, "rank": stream.rank, "stream": name, "message": text}
    return json.dumps(fields, ensure_ascii=False)


def parse_event(text: str) -> tuple[OutputStream, bytes] | tuple[Key, float] | None:
    """Returns output, or the value of a metric definition; None if a line is not an event of `train`."""
    if not text.startswith(_START):
        return None
    try:
        event = json.loads(text)
        kind, host, rank = event["shoal_event"], event["host"], event["rank"]
        if not (_HOST.fullmatch(host) and host.isprintable()):
            return None
        if not (rank is None or (type(rank) is int and 0 <= rank < _MOST_RANKS)):
            return None
        if kind == "metric":
            return _read_metric(event, host, rank)
        number, form = event["stream"], event["form"]
        if kind not in _KINDS or type(number) is not int or number not in (STDOUT, STDERR) or form not in _FORMS:
            return None
        return OutputStream(host, rank, number, form, kind == "log"), event["text"].encode("utf-8", "surrogateescape")
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None


def _read_metric(event: Mapping[str, Any], host: str, rank: int | None) -> tuple[Key, float]:
    value = event["value"]
    if type(value) not in (int, float) and value not in _NOT_FINITE:
        raise ValueError(value)
    return (clean_text(str(event["name"]))[:_MAX_NAME], host, rank), float(value)
