"""Trust by name for projects of tests, so that their packages are built. Their commands have other settings."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shoal import trust


def trust_directories(monkeypatch: pytest.MonkeyPatch, settings: Path, *directories: Path) -> None:
    """Use new settings in which directories are trusted. The settings of pip stay as they are."""
    of_pip = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config", "pip")
    settings.mkdir()
    if of_pip.exists():
        (settings / "pip").symlink_to(of_pip)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(settings))
    for directory in directories:
        trust.add_trusted(directory)
