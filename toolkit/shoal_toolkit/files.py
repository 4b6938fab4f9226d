"""Reads files that may be missing, such as those under /proc and /sys, and the data files of this package."""

from __future__ import annotations

import json
import os

from shoal_toolkit.fast_typing import Any


def read_text(*path: str) -> str:
    """Returns the text of a file; empty if it can't be read."""
    try:
        with open(os.path.join(*path), encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def list_names(*path: str, prefix: str = "") -> list[str]:
    """Returns the names in a directory that start with a prefix; none if it can't be read."""
    try:
        return [name for name in os.listdir(os.path.join(*path)) if name.startswith(prefix)]
    except OSError:
        return []


def read_table(name: str) -> dict[str, Any]:
    """Returns the content of data/NAME.json."""
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "data", f"{name}.json")
    with open(path, encoding="utf-8") as file:
        table: dict[str, Any] = json.load(file)
    return table
