"""Writes metrics from the log to output/metrics.jsonl, one line for each match of a metric definition.

{"time": "2026-01-31T12:00:00.123Z", "name": "loss", "value": 0.25, "rank": 0, "host": "algo-1"}

The value is the first group of the expression. A value that is not a finite number is left out, as in CloudWatch.
Every match in a line counts, on stdout and stderr.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence

from shoal_toolkit.job.metrics import MetricDefinition
from shoal_toolkit.light_typing import Any
from shoal_toolkit.log import format_time, write_log
from shoal_toolkit.output.lines import TextLines

_MAX_LENGTH = 4096  # characters of a line: an expression may take quadratic time, and the loop waits for it


class MetricsFile:
    """The file to which the metrics of all ranks are written. It is made by the first match."""

    def __init__(self, path: str, definitions: Sequence[MetricDefinition]) -> None:
        self.definitions = definitions
        self._path = path
        self._fd = -1
        self._broken = False

    def reader(self, rank: int, host: str) -> MetricReader:
        """Returns a reader for one stream of a rank."""
        return MetricReader(self, rank, host)

    def add(self, records: Sequence[dict[str, Any]]) -> None:
        """Appends records, and opens the file for the first. If it can't be written, the log says so once.

        The job then goes on without metrics.
        """
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


class MetricReader:
    """Finds metrics in one stream of a rank."""

    def __init__(self, file: MetricsFile, rank: int, host: str) -> None:
        self._file = file
        self._origin = {"rank": rank, "host": host}
        self._lines = TextLines()

    def feed(self, data: bytes) -> None:
        """Searches the lines that are complete now."""
        self._search(self._lines.feed(data))

    def flush(self) -> None:
        """Searches an incomplete last line."""
        self._search(self._lines.flush())

    def _search(self, lines: Sequence[str]) -> None:
        """Writes the metrics in these lines to the file. Only the first 4096 characters of a line are searched."""
        found = [
            {"time": "", "name": definition.name, "value": value, **self._origin}
            for line in lines
            for definition in self._file.definitions
            for match in definition.pattern.finditer(line[:_MAX_LENGTH])
            if (value := _parse_number(match[1])) is not None
        ]
        now = format_time() if found else ""
        self._file.add([{**record, "time": now} for record in found])


def _parse_number(text: str | None) -> float | None:
    """Returns a finite number; None for anything else."""
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if math.isfinite(value) else None
