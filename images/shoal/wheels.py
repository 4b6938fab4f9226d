"""Wheels: our own, built in this process, and the locked ones that already lie in pip's find-links directories."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from flit_core.wheel import make_wheel_in
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import Version

from shoal.lock import Pin

SOURCE_DATE_EPOCH = "1672531200"
"""Every time stamp inside what is built here, in seconds since 1970 (2023-01-01): the same source, the same bytes."""


@dataclass(frozen=True)
class Wheel:
    """A wheel file's name and bytes."""

    name: str
    content: bytes


def build(package: Path) -> Wheel:
    """Build the wheel of the package directory `package` (it holds a pyproject.toml for flit)."""
    os.environ["SOURCE_DATE_EPOCH"] = SOURCE_DATE_EPOCH  # flit reads it from the environment
    with TemporaryDirectory(prefix="shoal-wheel-") as directory:
        info = make_wheel_in(package / "pyproject.toml", Path(directory))
        return Wheel(info.file.name, info.file.read_bytes())


def at_hand(pins: Iterable[Pin], directories: Iterable[Path]) -> Iterator[Path]:
    """Yield the files in `directories` that are locked: same name, version and SHA-256."""
    wanted = {(pin.name, Version(pin.version)): pin for pin in pins}
    for directory in directories:
        for path in sorted(directory.glob("*.whl")):
            try:
                name, version, _, _ = parse_wheel_filename(path.name)
            except InvalidWheelFilename:
                continue
            pin = wanted.get((canonicalize_name(name), version))
            if pin and _sha256(path) == pin.sha256:
                yield path


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
