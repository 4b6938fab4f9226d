"""Metrics read from the log, as SageMaker's metric definitions do: each match of an expression is a line of
output/metrics.jsonl.

{"time": "2026-01-31T12:00:00.123Z", "name": "loss", "value": 0.25, "rank": 0, "host": "algo-1"}

Definitions are a list of {"Name": "loss", "Regex": "loss: ([0-9.]+)"}, from the first of these that there is: the
hyperparameter `sagemaker_metric_definitions`, `input/config/metrics.json`, `metrics.json` beside the code (where a
file that holds no list is somebody else's). The value is the first group; what is no finite number is left out, as in
CloudWatch. Every match in a line counts, on stdout and stderr.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Sequence

from shoal_toolkit.errors import ContractError
from shoal_toolkit.job.contract import HYPERPARAMETERS, Paths, decode
from shoal_toolkit.light_typing import Any, NamedTuple
from shoal_toolkit.log import say
from shoal_toolkit.output.jsonlines import now
from shoal_toolkit.output.output import METRICS, METRICS_KEY
from shoal_toolkit.output.streams import TextLines

OUTPUT = "metrics.jsonl"
_LONGEST = 4096  # characters of a line: an expression may take the square of it, and nothing else happens meanwhile
_FORM = '[{"Name": "loss", "Regex": "loss: ([0-9.]+)"}]'


class Definition(NamedTuple):
    """One metric; the first group of the expression is its value."""

    name: str
    pattern: re.Pattern[str]


class Metrics:
    """The file that all matches go to."""

    def __init__(self, path: str, definitions: Sequence[Definition]) -> None:
        self.definitions = definitions
        self._path = path
        self._fd = -1
        self._broken = False

    def add(self, records: Sequence[dict[str, Any]]) -> None:
        """Append records, at once. A file that cannot be written is no reason to end a training."""
        if self._broken or not records:
            return
        try:
            if self._fd < 0:
                self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            data = "".join(f"{json.dumps(record)}\n" for record in records).encode()
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError as error:
            self._broken = True
            say(f"{self._path} cannot be written any more: {error.strerror}. The job goes on without metrics.")

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Meter:
    """Reads one stream of a rank."""

    def __init__(self, metrics: Metrics, rank: int, host: str) -> None:
        self._metrics = metrics
        self._rank = rank
        self._host = host
        self._lines = TextLines()

    def feed(self, data: bytes) -> None:
        """Look through the lines that are complete now."""
        self._read(self._lines.feed(data))

    def flush(self) -> None:
        """Look through what is left."""
        self._read(self._lines.flush())

    def _read(self, lines: Sequence[str]) -> None:
        found = [
            (definition.name, value)
            for line in (whole[:_LONGEST] for whole in lines)
            for definition in self._metrics.definitions
            for match in definition.pattern.finditer(line)
            if (value := _number(match[1])) is not None
        ]
        if found:
            time = now()
            self._metrics.add(
                [
                    {"time": time, "name": name, "value": value, "rank": self._rank, "host": self._host}
                    for name, value in found
                ]
            )


def _number(text: str | None) -> float | None:
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def read_metrics(paths: Paths, code_dir: str) -> Metrics | None:
    """Return the metrics of a job, if it defines any. Raises ContractError naming the file and the metric."""
    source, listed = _listed(paths, code_dir)
    if listed is None:
        return None
    if not isinstance(listed, list):
        raise ContractError(f"{source} must be a list of metric definitions, such as {_FORM}.")
    definitions = [_definition(item, index, source) for index, item in enumerate(listed)]
    return Metrics(os.path.join(paths.output, OUTPUT), definitions) if definitions else None


def _listed(paths: Paths, code_dir: str) -> tuple[str, Any]:
    """Return where metrics are defined, and as what; None: nowhere."""
    path = os.path.join(paths.config, HYPERPARAMETERS)
    given = decode((_load(path) or {}).get(METRICS_KEY))
    if given is not None:
        return f"{HYPERPARAMETERS}: {METRICS_KEY}", given
    path = os.path.join(paths.config, METRICS)
    if os.path.isfile(path):
        return path, _load(path)
    path = os.path.join(code_dir, METRICS)
    beside = _load(path) if os.path.isfile(path) else None
    return path, beside if isinstance(beside, list) else None


def _load(path: str) -> Any:
    try:
        with open(path, encoding="utf-8-sig") as file:
            return json.load(file)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ContractError(f"{path} cannot be read as JSON: {error}. It must be a list such as {_FORM}.") from None


def _definition(item: Any, index: int, source: str) -> Definition:
    name, regex = (item.get("Name"), item.get("Regex")) if isinstance(item, dict) else (None, None)
    if not isinstance(name, str) or not name or not isinstance(regex, str):
        raise ContractError(f"{source}: definition {index + 1} is {item!r}; it must have a Name and a Regex: {_FORM}.")
    try:
        pattern = re.compile(regex)
    except (re.error, OverflowError, RecursionError) as error:
        raise ContractError(
            f"{source}: the Regex of the metric {name!r} is {regex!r}, which is no regular expression: {error}."
        ) from None
    if not pattern.groups:
        raise ContractError(
            f"{source}: the Regex of the metric {name!r} is {regex!r}, which has no group. Put the number in "
            "parentheses, such as loss: ([0-9.]+)."
        )
    return Definition(name, pattern)
