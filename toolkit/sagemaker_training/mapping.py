"""Hyperparameters and variables as text, by the functions with which `train` makes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sagemaker_training._absent import refuse_others


def to_cmd_args(mapping: Mapping[str, Any]) -> list[str]:
    """Returns hyperparameters as arguments of a script, sorted by name, such as `["--lr", "0.1"]`.

    A list becomes JSON. (AWS's toolkit writes it in Python's syntax.)
    """
    from shoal_toolkit.plan.arguments import format_arguments

    return format_arguments(mapping)


def to_env_vars(mapping: Mapping[str, Any]) -> dict[str, str]:
    """Returns values as variables: `{"hosts": ["a"]}` is `{"SM_HOSTS": '["a"]'}`."""
    from shoal_toolkit.plan.environment import format_variable

    return {f"SM_{name.upper()}": format_variable(value) for name, value in mapping.items()}


__getattr__ = refuse_others(__name__, (), {}, "mapping.to_cmd_args, mapping.to_env_vars, or a dict")
