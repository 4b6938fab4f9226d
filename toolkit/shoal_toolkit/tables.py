"""The data files of the package: data/*.json."""

from __future__ import annotations

import json
import os

from shoal_toolkit.light_typing import Any


def read_table(name: str) -> dict[str, Any]:
    """Returns the content of data/NAME.json."""
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "data", f"{name}.json")
    with open(path, encoding="utf-8") as file:
        table: dict[str, Any] = json.load(file)
    return table
