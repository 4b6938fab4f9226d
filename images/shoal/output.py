"""What a command prints for programs (`--json`): one JSON document on standard output, and nothing else there."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any


def write(document: object) -> None:
    """Print a document, of which frozen dataclasses and paths may be parts."""
    print(json.dumps(document, indent=2, default=_plain))


def _plain(value: object) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no form in JSON")
