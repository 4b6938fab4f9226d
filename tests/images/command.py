"""The command `shoal` in processes that have imported its dependencies, but none of its own modules (tests/warm.py)."""

from __future__ import annotations

import sys
from pathlib import Path

from ..launching import warm_python

_DEPENDENCIES = ("docker", "jinja2", "packaging.version", "pydantic", "rich.console", "ruamel.yaml", "typer")


def shoal_command() -> list[str]:
    """Return the words that stand for `shoal`."""
    return [warm_python(*_DEPENDENCIES), str(Path(sys.executable).with_name("shoal"))]
