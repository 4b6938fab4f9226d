"""Wheels: our own, built in this process, and the locked ones that already lie in pip's find-links directories."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import io
import os
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import tomllib
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import Version

from shoal.sources.lock import Pin

SOURCE_DATE_EPOCH = "1672531200"
"""Every time stamp inside what is built here, in seconds since 1970 (2023-01-01): the same source, the same bytes."""


@dataclass(frozen=True)
class Wheel:
    """A wheel file's name and bytes."""

    name: str
    content: bytes

    @functools.cached_property
    def files(self) -> dict[str, str]:
        """The SHA-256 (hexadecimal) of the files in it, by name, less the list of them."""
        with zipfile.ZipFile(io.BytesIO(self.content)) as archive:
            names = [name for name in archive.namelist() if not name.endswith("/RECORD")]
            return {name: hashlib.sha256(archive.read(name)).hexdigest() for name in names}


def build(package: Path) -> Wheel:
    """Build the wheel of the package directory `package` with the build backend that its pyproject.toml names.

    It is the same on every host: hatchling's hooks, which compile, do not run. What an image needs compiled is compiled
    in the image's own build.
    """
    os.environ.update(SOURCE_DATE_EPOCH=SOURCE_DATE_EPOCH, HATCH_BUILD_NO_HOOKS="true")  # backends read them there
    backend = tomllib.loads((package / "pyproject.toml").read_text())["build-system"]["build-backend"]
    with TemporaryDirectory(prefix="shoal-wheel-") as directory, contextlib.chdir(package):
        name = importlib.import_module(backend).build_wheel(directory)
        return Wheel(name, Path(directory, name).read_bytes())


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
