"""The metric definitions of a job: of `--metric`. `train` searches them, and writes their metrics as events."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from shoal.errors import UsageError

HYPERPARAMETER = "sagemaker_metric_definitions"


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
