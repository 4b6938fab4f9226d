"""Reads files that the kernel may not offer, such as those under /proc and /sys."""

from __future__ import annotations

import os


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
