"""The metric definitions of a job: of `--metric`, and for its live view. `train` writes their metrics into a file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from shoal.clean_text import clean_text, print_error
from shoal.errors import UsageError
from shoal.jobs.job import JobRequest
from shoal.jobs.job_log import MAX_SERIES, Key, Series
from shoal.jobs.metric_search import MetricDefinition
from shoal.limits import MOST_LOCK, read_file

HYPERPARAMETER, _FILE = "sagemaker_metric_definitions", "metrics.json"
_METRICS = "*/output/metrics.jsonl"
_MAX_METRICS_SIZE = 64 << 20  # characters of a file
_MAX_NAME = 200  # characters of a metric, and of its host


def encode_definitions(given: Mapping[str, str]) -> str:
    """Return the hyperparameter for names and regular expressions. Raises `UsageError` if `train` would refuse one."""
    for name, regex in given.items():
        try:
            groups = re.compile(regex).groups
        except (re.error, OverflowError, RecursionError) as error:
            raise UsageError(f"--metric {name}={regex}: not a regular expression: {error}") from error
        if not groups:
            raise UsageError(
                f"--metric {name}={regex}: has no group for the value. Fix: put the value in parentheses, such as"
                rf" '{name}={name}: ([0-9.]+)'"
            )
    return json.dumps([{"Name": name, "Regex": regex} for name, regex in given.items()])


def check_definitions(hyperparameters: Mapping[str, str]) -> None:
    """Raise `UsageError` if the hyperparameter for metric definitions is not JSON. `train` checks the rest."""
    try:
        json.loads(hyperparameters.get(HYPERPARAMETER, "[]"))
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"--hyperparameter {HYPERPARAMETER}: not JSON: {error}. JSON has no escape such as \\., only \\\\. Fix:"
            " --metric NAME=REGEX"
        ) from error


def read_definitions(request: JobRequest) -> list[MetricDefinition]:
    """Return the definitions in the hyperparameter or in metrics.json of the source, which `train` reads too.

    Wrong ones are left out: `train` reports them.
    """
    try:
        text = request.hyperparameters.get(HYPERPARAMETER)
        if text is None:
            if request.source is None:  # the file may be in the image
                return []
            text = read_file(request.source / _FILE, MOST_LOCK, follow=True).decode("utf-8-sig")
        listed = json.loads(text)
    except (OSError, ValueError, RecursionError):
        return []
    return list(_compile(listed if isinstance(listed, list) else []))


def _compile(listed: Iterable[Any]) -> Iterator[MetricDefinition]:
    for each in listed:
        try:
            pattern = re.compile(each["Regex"])
        except (TypeError, KeyError, re.error, OverflowError, RecursionError):
            continue
        if pattern.groups:
            yield MetricDefinition(str(each.get("Name")), pattern)


def read_metrics(directory: Path, began: float) -> dict[Key, Series]:
    """Return the metrics that `train` has written on the hosts of a job; none without definitions.

    Warn of a file that cannot be read.
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
    """Yield the origin, time and value of each metric in a file. Lines of another form are skipped."""
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
