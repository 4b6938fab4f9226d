"""Hyperparameters as the script's command-line arguments. Pure.

Sorted by name; a one-letter name gives `-x value`, a longer one `--name value`. Values: text as is, None as an empty
string, true and false as `True` and `False`, an object as `k=v,k=v`, a list as JSON (`[1, "x"]`; the stock toolkit
writes Python's repr there, which no JSON or shell tool reads), everything else as Python prints it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def script_arguments(hyperparameters: Mapping[str, Any]) -> list[str]:
    """Return the arguments for the script, two words for each hyperparameter."""
    words: list[str] = []
    for name in sorted(hyperparameters):
        words += [_option(name), argument_value(hyperparameters[name])]
    return words


def argument_value(value: Any) -> str:
    """Return one value as the script receives it."""
    if value is None:
        return ""
    if isinstance(value, Mapping):
        return ",".join(f"{key}={value[key]}" for key in sorted(value))
    if isinstance(value, list):
        return json.dumps(value)
    return str(value)


def _option(name: str) -> str:
    return f"-{name}" if len(name) == 1 else f"--{name}"
