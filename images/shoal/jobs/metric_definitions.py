"""The metric definitions of a job, for its live view. `train` checks them, and writes their metrics into a file."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from shoal.jobs.job import JobRequest

_HYPERPARAMETER, _FILE = "sagemaker_metric_definitions", "metrics.json"
_MAX_LENGTH = 4096  # characters of a line, as in `train`


class MetricDefinition(NamedTuple):
    """A metric. Its value is the first group of the expression."""

    name: str
    pattern: re.Pattern[str]


def read_definitions(request: JobRequest) -> list[MetricDefinition]:
    """Return the definitions in the hyperparameter or in metrics.json of the source, which `train` reads too.

    Wrong ones are left out: `train` reports them.
    """
    try:
        text = request.hyperparameters.get(_HYPERPARAMETER)
        if text is None:
            if request.source is None:  # the file may be in the image
                return []
            text = (request.source / _FILE).read_text("utf-8-sig")
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


def find_metrics(definitions: Iterable[MetricDefinition], text: str) -> Iterator[tuple[str, float]]:
    """Yield the names and finite values of the metrics in a line."""
    for name, pattern in definitions:
        for match in pattern.finditer(text[:_MAX_LENGTH]):
            try:
                value = float(match[1] or "")
            except ValueError:
                continue
            if math.isfinite(value):
                yield name, value
