"""Finds the locked wheels in local directories: pip's find-links directories, or the wheels of a bundle."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import Version

from shoal.sources.pins import Pin


def find_locked_wheels(pins: Iterable[Pin], directories: Iterable[Path]) -> Iterator[tuple[Pin, Path]]:
    """Yield the wheels in `directories` that are locked, each after its pin: same name, version and SHA-256."""
    wanted = {(pin.name, Version(pin.version)): pin for pin in pins}
    for path in (path for directory in directories for path in sorted(directory.glob("*.whl"))):
        try:
            name, version, _, _ = parse_wheel_filename(path.name)
        except InvalidWheelFilename:
            continue
        pin = wanted.get((canonicalize_name(name), version))
        if pin and path.is_file() and _sha256(path) == pin.sha256:
            yield pin, path


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
