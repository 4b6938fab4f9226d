"""What a command prints for programs (`--json`): one JSON document on standard output, and nothing else there."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pydantic


def write(document: object) -> None:
    """Print a document, of which frozen dataclasses, models, paths and errors may be parts."""
    print(text(document))


def text(document: object) -> str:
    """Return what `write` prints."""
    return json.dumps(document, indent=2, default=_plain)


def _plain(value: object) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, pydantic.BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Exception):
        return str(value) or type(value).__name__
    raise TypeError(f"{type(value).__name__} has no form in JSON")
