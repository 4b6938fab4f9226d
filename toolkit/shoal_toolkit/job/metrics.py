"""Reads the metric definitions of a job, in SageMaker's form: [{"Name": "loss", "Regex": "loss: ([0-9.]+)"}].

The first of these counts: the hyperparameter `sagemaker_metric_definitions`, `input/config/metrics.json`,
`metrics.json` in the code directory. The last is ignored if it contains no list, because it may belong to another
program.
"""

from __future__ import annotations

import json
import os
import re

from shoal_toolkit.errors import ContractError
from shoal_toolkit.fast_typing import Any, NamedTuple

_FILE = "metrics.json"
_EXAMPLE = '[{"Name": "loss", "Regex": "loss: ([0-9.]+)"}]'


class MetricPattern(NamedTuple):
    """One metric; its value is the first group of the expression."""

    name: str
    pattern: re.Pattern[str]


def read_metric_definitions(config: str, code_dir: str, hyperparameter: Any) -> tuple[MetricPattern, ...]:
    """Reads and checks the metric definitions of a job.

    Args:
        config: The directory input/config.
        code_dir: The directory of the user's code.
        hyperparameter: The decoded value of `sagemaker_metric_definitions`; None if it is not set.

    Returns:
        The definitions, none if the job defines no metrics.

    Raises:
        ContractError: If a definition is wrong; names the file and the metric.
    """
    source, listed = _find_definitions(config, code_dir, hyperparameter)
    if listed is None:
        return ()
    if not isinstance(listed, list):
        raise ContractError(f"{source} is not a list of metric definitions. Fix: write one, such as {_EXAMPLE}.")
    return tuple(_check_definition(item, index, source) for index, item in enumerate(listed))


def _find_definitions(config: str, code_dir: str, hyperparameter: Any) -> tuple[str, Any]:
    """The hyperparameter comes first, then the file in the configuration, then a file with a list in the code."""
    if hyperparameter is not None:
        return "hyperparameters.json: sagemaker_metric_definitions", hyperparameter
    path = os.path.join(config, _FILE)
    if os.path.isfile(path):
        return path, _load_json(path)
    path = os.path.join(code_dir, _FILE)
    listed = _load_json(path) if os.path.isfile(path) else None
    return path, listed if isinstance(listed, list) else None


def _load_json(path: str) -> Any:
    try:
        with open(path, encoding="utf-8-sig") as file:
            return json.load(file)
    except (OSError, ValueError) as error:
        raise ContractError(f"{path} cannot be read as JSON: {error}. Fix: write a list such as {_EXAMPLE}.") from None


def _check_definition(item: Any, index: int, source: str) -> MetricPattern:
    name, regex = (item.get("Name"), item.get("Regex")) if isinstance(item, dict) else (None, None)
    if not isinstance(name, str) or not name or not isinstance(regex, str):
        raise ContractError(
            f"{source}: definition {index + 1} is {item!r}; it must have a Name and a Regex. Fix: write {_EXAMPLE}."
        )
    try:
        pattern = re.compile(regex)
    except (re.error, OverflowError, RecursionError) as error:
        raise ContractError(
            f"{source}: the Regex of the metric {name!r} is {regex!r}, which is not a regular expression of Python: "
            f"{error}. Fix: correct it."
        ) from None
    if not pattern.groups:
        raise ContractError(
            f"{source}: the Regex of the metric {name!r} is {regex!r}, which has no group. "
            "Fix: put the number in parentheses, such as loss: ([0-9.]+)."
        )
    return MetricPattern(name, pattern)
