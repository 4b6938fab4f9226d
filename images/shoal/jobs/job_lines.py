"""Reads the log of a job from its directory, also while it grows."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import IO

from shoal.errors import UsageError
from shoal.jobs import running
from shoal.jobs.job_log import parse_line
from shoal.jobs.store import LOG
from shoal.limits import MOST_LOG_LINE, open_regular

_PAUSE = 0.2
"""Seconds between two looks at a log that grows."""
_MOST_LINE = 8 * MOST_LOG_LINE  # bytes; JSON writes up to six for one


@dataclass(frozen=True)
class LineFilter:
    """Which lines to show; None: all."""

    host: str | None = None
    rank: int | None = None

    def accepts(self, host: str, text: str) -> bool:
        """Return whether to show a line that came from a host."""
        if self.host is None and self.rank is None:
            return True
        line = parse_line(0, host, text)
        return self.host in (None, line.host) and self.rank in (None, line.rank)


def read_lines(
    directory: Path, chosen: LineFilter, *, tail: int | None = None, follow: bool = False, timestamps: bool = False
) -> Iterator[str]:
    """Yield the lines of a job's log, each after the name of its host.

    Args:
        directory: The job's directory.
        chosen: Which lines to yield.
        tail: How many of the existing lines to yield, the last ones; None: all.
        follow: Whether to wait for further lines until the job has ended.
        timestamps: Whether a line begins with its time, in this machine's time zone.

    Raises:
        UsageError: If the log is not a file, but such as a link or a pipe.
    """
    path = directory / LOG
    while follow and not path.exists() and running.is_running(directory):
        time.sleep(_PAUSE)
    if not os.path.lexists(path):
        return
    try:
        opened = open_regular(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: cannot be read: {error}. Fix: remove it") from error
    with opened as file:
        found = (_format(*each, timestamps) for each in _read_whole(file) if chosen.accepts(*each[1:]))
        yield from found if tail is None else deque(found, maxlen=tail)
        while follow:
            is_last = not running.is_running(directory)
            yield from (_format(*each, timestamps) for each in _read_whole(file) if chosen.accepts(*each[1:]))
            if is_last:
                return
            time.sleep(_PAUSE)


def _read_whole(file: IO[bytes]) -> Iterator[tuple[float, str, str]]:
    """Yield time, host and text of each whole line. One that is still being written is left for the next call.

    Lines of another form are left out.
    """
    while True:
        place = file.tell()
        line = file.readline(_MOST_LINE)
        if not line.endswith(b"\n") and len(line) < _MOST_LINE:
            file.seek(place)
            return
        with contextlib.suppress(ValueError, TypeError, OverflowError, RecursionError):  # of another program
            at, host, text = json.loads(line)
            datetime.fromtimestamp(at)
            yield at, str(host), str(text)


def _format(at: float, host: str, text: str, timestamps: bool) -> str:
    time_of_line = f"{datetime.fromtimestamp(at):%Y-%m-%d %H:%M:%S} " if timestamps else ""
    return f"{time_of_line}{host} | {text}"
