"""Writes metrics from the log to output/metrics.jsonl, one line for each match of a metric definition.

{"time": "2026-01-31T12:00:00.123Z", "name": "loss", "value": 0.25, "rank": 0, "host": "algo-1"}

The value is the first group of the expression: a number, or the text nan, inf or -inf, which JSON has no numbers for.
Every match in a line counts, on stdout and stderr. `shoal run` gets each record as an event too.

An expression can take years for one line. A signal of a timer for CPU time interrupts it: Python's search looks for
signals.
"""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Sequence

from shoal_toolkit.fast_typing import Any
from shoal_toolkit.job.metrics import MetricPattern
from shoal_toolkit.log import format_time, write_event, write_log
from shoal_toolkit.output.lines import TextLines

_MAX_LENGTH = 4096  # characters of a line: an expression may take quadratic time, and the loop waits for it
# Of CPU time, for the lines of one read, which are at most 64 KiB. Other hosts take this one for lost after 10 s.
_MAX_SECONDS = 2.0


class MetricsFile:
    """The file to which the metrics of all ranks are written. It is made by the first match."""

    def __init__(self, path: str, definitions: Sequence[MetricPattern]) -> None:
        self.definitions = definitions
        self._path = path
        self._fd = -1
        self._broken = False
        self._searches = False
        signal.signal(signal.SIGVTALRM, self._on_alarm)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGVTALRM])

    def reader(self, rank: int, host: str) -> MetricLineReader:
        """Returns a reader for one stream of a rank."""
        return MetricLineReader(self, rank, host)

    def search(self, lines: Sequence[str], origin: dict[str, Any]) -> None:
        """Writes the metrics in lines to the file. Only the first 4096 characters of a line are searched.

        An expression that takes too long is not searched any more, from these lines on.
        """
        found: dict[tuple[int, int], list[dict[str, Any]]] = {}  # in the order of lines, then of definitions
        for place, definition in enumerate(self.definitions):
            try:
                self._searches = True
                signal.setitimer(signal.ITIMER_VIRTUAL, _MAX_SECONDS)
                for number, line in enumerate(lines):
                    if values := _find_values(definition, line):
                        found[number, place] = [{"name": definition.name, "value": value} for value in values]
                self._searches = False
            except TimeoutError:
                self.definitions = [other for other in self.definitions if other is not definition]
                write_log(
                    f"the expression of the metric {definition.name!r} takes too long, and is not searched any more: "
                    f"{definition.pattern.pattern!r}. Fix: no repetition inside a repetition, as in (a+)+"
                )
            finally:
                signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        now = format_time() if found else ""
        self.add([{"time": now, **record, **origin} for key in sorted(found) for record in found[key]])

    def _on_alarm(self, number: int, frame: object) -> None:
        """Interrupts a search. Python may call this a moment after the search."""
        if self._searches:
            self._searches = False
            raise TimeoutError

    def add(self, records: Sequence[dict[str, Any]]) -> None:
        """Appends records, and opens the file for the first. If it can't be written, the log says so once.

        The job then goes on without metrics.
        """
        for record in records:
            write_event("metric", record)
        if self._broken or not records:
            return
        try:
            if self._fd < 0:
                self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK, 0o666)
            data = "".join(f"{json.dumps(record)}\n" for record in records).encode()
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError as error:
            self._broken = True
            write_log(f"{self._path} cannot be written any more: {error.strerror}. The job goes on without metrics.")

    def close(self) -> None:
        """Closes the file, if a match has opened it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class MetricLineReader:
    """Finds metrics in one stream of a rank."""

    def __init__(self, file: MetricsFile, rank: int, host: str) -> None:
        self._file = file
        self._origin = {"rank": rank, "host": host}
        self._lines = TextLines()

    def feed(self, data: bytes) -> None:
        """Searches the lines that are complete now."""
        self._file.search(self._lines.feed(data), self._origin)

    def flush(self) -> None:
        """Searches an incomplete last line."""
        self._file.search(self._lines.flush(), self._origin)


def _find_values(definition: MetricPattern, line: str) -> list[float | str]:
    values: list[float | str] = []
    for match in definition.pattern.finditer(line[:_MAX_LENGTH]):
        try:
            value = float(match[1] or "")
        except ValueError:
            continue
        values.append(value if math.isfinite(value) else str(value))
    return values
