"""The tables that ship with the package: data/*.json."""

from __future__ import annotations

import json
import os

from shoal_toolkit.light_typing import Any


def read_table(name: str) -> dict[str, Any]:
    """Return the table of that name."""
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "data", f"{name}.json")
    with open(path, encoding="utf-8") as file:
        table: dict[str, Any] = json.load(file)
    return table
