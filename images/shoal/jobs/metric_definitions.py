"""The metric definitions of a job: of `--metric`, and their search for the live view in a process of its own.

`train` writes their metrics into a file. The expressions may be from files beside the script. One can take years for a
line of the script, and no other thread of its process runs meanwhile: neither would an interrupt. So the process is
killed after a limit.
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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import IO, Any, NamedTuple

from shoal.clean_text import clean_text, print_error
from shoal.errors import UsageError
from shoal.jobs.job_log import MAX_SERIES, Key, Series
from shoal.limits import MOST_LOCK, read_file

HYPERPARAMETER, _FILE = "sagemaker_metric_definitions", "metrics.json"
_METRICS = "*/output/metrics.jsonl"
_MAX_METRICS_SIZE = 64 << 20  # characters of a file
_MAX_NAME = 200  # characters of a metric, and of its host


def encode_definitions(given: Mapping[str, str]) -> str:
    """Returns the hyperparameter for names and regular expressions. Raises `UsageError` if `train` would refuse one."""
    for name, regex in given.items():
        try:
            groups = re.compile(regex).groups
        except (re.error, OverflowError, RecursionError) as error:
            raise UsageError(
                f"--metric {name}={regex}: not a regular expression: {error}. Fix: put a backslash before each"
                " special character that is meant literally"
            ) from error
        if not groups:
            raise UsageError(
                f"--metric {name}={regex}: has no group for the value. Fix: put the value in parentheses, such as"
                rf" '{name}={name}: ([0-9.]+)'"
            )
    return json.dumps([{"Name": name, "Regex": regex} for name, regex in given.items()])


def check_definitions(hyperparameters: Mapping[str, str]) -> None:
    """Raises `UsageError` if the hyperparameter for metric definitions is not JSON. `train` checks the rest."""
    try:
        json.loads(hyperparameters.get(HYPERPARAMETER, "[]"))
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"--hyperparameter {HYPERPARAMETER}: not JSON: {error}. JSON has no escape such as \\., only \\\\. Fix:"
            " --metric NAME=REGEX"
        ) from error


def read_definitions(hyperparameters: Mapping[str, str], source: Path | None) -> list[MetricPattern]:
    """Returns the definitions in the hyperparameter or in metrics.json of the source, which `train` reads too.

    Wrong ones are left out: `train` reports them.
    """
    try:
        text = hyperparameters.get(HYPERPARAMETER)
        if text is None:
            if source is None:  # the file may be in the image
                return []
            text = read_file(source / _FILE, MOST_LOCK, follow=True).decode("utf-8-sig")
        listed = json.loads(text)
    except (OSError, ValueError, RecursionError):
        return []
    return list(_compile(listed if isinstance(listed, list) else []))


def _compile(listed: Iterable[Any]) -> Iterator[MetricPattern]:
    for each in listed:
        try:
            pattern = re.compile(each["Regex"])
        except (TypeError, KeyError, re.error, OverflowError, RecursionError):
            continue
        if pattern.groups:
            yield MetricPattern(str(each.get("Name")), pattern)


def read_metrics(directory: Path, began: float) -> dict[Key, Series]:
    """Returns the metrics that `train` has written on the hosts of a job; none without definitions.

    Warns of a file that cannot be read.
    """
    series: dict[Key, Series] = {}
    for path in filter(Path.is_file, sorted(directory.glob(_METRICS))):  # a pipe would have no end
        try:
            for key, at, value in _read_metrics_file(path):
                if key in series or len(series) < MAX_SERIES:
                    series.setdefault(key, Series()).add(round(at - began, 2), value)
        except OSError as error:
            print_error(f"warning: {path}: {error.strerror}: the report lacks its metrics")
    return series


def _read_metrics_file(path: Path) -> Iterator[tuple[Key, float, float]]:
    """Yields the origin, time and value of each metric in a file. Lines of another form are skipped."""
    left = _MAX_METRICS_SIZE
    with path.open(encoding="utf-8", errors="replace") as file:
        while left > 0 and (line := file.readline(left)):
            left -= len(line)
            try:
                record = json.loads(line, parse_constant=str)
                at, value = datetime.fromisoformat(record["time"]).timestamp(), float(record["value"])
                name, host = (clean_text(str(record[key]))[:_MAX_NAME] for key in ("name", "host"))
                if type(record["rank"]) is int and record["rank"] in range(10**9):
                    yield (name, host, record["rank"]), at, value
            except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
                continue


_MAX_LENGTH = 4096  # characters of a line, as in `train`
_SECONDS = 5.0
"""How long the search in the lines of one write to the terminal may take. It usually takes milliseconds."""


class MetricPattern(NamedTuple):
    """A metric. Its value is the first group of the expression."""

    name: str
    pattern: re.Pattern[str]


class MetricSearch:
    """The process that searches. It starts with the first lines, and ends with `close`."""

    def __init__(self, definitions: Sequence[MetricPattern]) -> None:
        self._definitions = definitions
        self._process: subprocess.Popen[bytes] | None = None

    def search(self, lines: Sequence[str], seconds: float = _SECONDS) -> list[list[tuple[str, float]]] | None:
        """Returns the names and values of the metrics in each line. None if that took too long or failed."""
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
        """Kills the process."""
        if self._process:
            with contextlib.suppress(BrokenPipeError), self._process:  # a line may be left for a dead process
                self._process.kill()


def find_metrics(definitions: Iterable[MetricPattern], text: str) -> Iterator[tuple[str, float]]:
    """Yields the names and values of the metrics in a line."""
    for name, pattern in definitions:
        for match in pattern.finditer(text[:_MAX_LENGTH]):
            with contextlib.suppress(ValueError):
                yield name, float(match[1] or "")


def _start() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "shoal.jobs.metric_definitions"],
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
    """Body of the process: answers each line of standard input, until its end."""
    given = (json.loads(line) for line in sys.stdin.buffer)
    definitions = [MetricPattern(name, re.compile(pattern)) for name, pattern in next(given)]
    with os.fdopen(1, "wb") as out:
        for lines in given:
            _send(out, [list(find_metrics(definitions, line)) for line in lines])


if __name__ == "__main__":
    _serve()
