"""Searches metrics in lines of a log, in a process of its own.

The expressions may be from files beside the script. One can take years for a line of the script, and no other thread of
its process runs meanwhile: neither would an interrupt. So the process is killed after a limit.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import IO, NamedTuple

_MAX_LENGTH = 4096  # characters of a line, as in `train`
_SECONDS = 5.0
"""How long the search in the lines of one write to the terminal may take. It usually takes milliseconds."""


class MetricDefinition(NamedTuple):
    """A metric. Its value is the first group of the expression."""

    name: str
    pattern: re.Pattern[str]


class MetricSearch:
    """The process that searches. It starts with the first lines, and ends with `close`."""

    def __init__(self, definitions: Sequence[MetricDefinition]) -> None:
        self._definitions = definitions
        self._process: subprocess.Popen[bytes] | None = None

    def search(self, lines: Sequence[str], seconds: float = _SECONDS) -> list[list[tuple[str, float]]] | None:
        """Return the names and values of the metrics in each line. None if that took too long or failed."""
        with contextlib.suppress(OSError, ValueError, EOFError):
            if self._process is None:
                self._process = _start()
                _send(self._process.stdin, [[name, pattern.pattern] for name, pattern in self._definitions])
            _send(self._process.stdin, lines)
            found = json.loads(_receive(self._process.stdout, time.monotonic() + seconds))
            return [[(name, value) for name, value in each] for each in found]
        self.close()
        return None

    def close(self) -> None:
        """Kill the process."""
        if self._process:
            with contextlib.suppress(BrokenPipeError), self._process:  # a line may be left for a dead process
                self._process.kill()


def find_metrics(definitions: Iterable[MetricDefinition], text: str) -> Iterator[tuple[str, float]]:
    """Yield the names and values of the metrics in a line."""
    for name, pattern in definitions:
        for match in pattern.finditer(text[:_MAX_LENGTH]):
            with contextlib.suppress(ValueError):
                yield name, float(match[1] or "")


def _start() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "shoal.jobs.metric_search"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for the job
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )


def _send(file: IO[bytes] | None, document: object) -> None:
    assert file is not None
    file.write(json.dumps(document).encode() + b"\n")
    file.flush()


def _receive(file: IO[bytes] | None, deadline: float) -> bytes:
    """Return a line. Raises TimeoutError after the deadline, and EOFError at the end."""
    assert file is not None
    received = b""
    while not received.endswith(b"\n"):
        if not select.select([file], [], [], max(deadline - time.monotonic(), 0))[0]:
            raise TimeoutError
        if not (chunk := os.read(file.fileno(), 1 << 16)):
            raise EOFError
        received += chunk
    return received


def _serve() -> None:
    """Body of the process: answer each line of standard input, until its end."""
    given = (json.loads(line) for line in sys.stdin.buffer)
    definitions = [MetricDefinition(name, re.compile(pattern)) for name, pattern in next(given)]
    with os.fdopen(1, "wb") as out:
        for lines in given:
            _send(out, [list(find_metrics(definitions, line)) for line in lines])


if __name__ == "__main__":
    _serve()
