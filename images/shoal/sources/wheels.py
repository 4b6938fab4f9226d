"""Wheels: our own, built in this process, the locked ones that already lie in pip's find-links directories, and what
unpacks ours in an image."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import io
import os
import shutil
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import tomllib
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import Version

from shoal.errors import BuildError
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


def build(package: Path, cache: Path) -> Wheel:
    """Build the wheel of the package directory `package` with the build backend that its pyproject.toml names.

    One that was built of the same files by the same backend is taken from the directory `cache`. It is the same on
    every host: hatchling's hooks, which compile, do not run. What an image needs compiled is compiled in the image's
    own build.
    """
    backend = tomllib.loads((package / "pyproject.toml").read_text())["build-system"]["build-backend"]
    kept = cache / "wheels" / f"{package.name}-{_identity(package, backend.partition('.')[0])}"
    with contextlib.suppress(FileNotFoundError):  # another build has just replaced it
        for path in kept.glob("*.whl"):
            return Wheel(path.name, path.read_bytes())
    os.environ.update(SOURCE_DATE_EPOCH=SOURCE_DATE_EPOCH, HATCH_BUILD_NO_HOOKS="true")  # backends read them there
    with TemporaryDirectory(prefix="shoal-wheel-") as directory, contextlib.chdir(package):
        name = importlib.import_module(backend).build_wheel(directory)
        wheel = Wheel(name, Path(directory, name).read_bytes())
    _keep(wheel, kept)
    return wheel


def _identity(package: Path, backend: str) -> str:
    """Return a digest of what a wheel is made of: all files that may go into it, what leaves some out, the backend."""
    state = hashlib.sha256(f"{backend} {importlib.metadata.version(backend)} {SOURCE_DATE_EPOCH}".encode())
    files = {str(path.relative_to(package)): path for path in package.rglob("*") if "__pycache__" not in path.parts}
    files["../.gitignore"] = package.resolve().parent / ".gitignore"  # which hatchling obeys
    for name, path in sorted(files.items()):
        if path.is_file():
            state.update(f"{name}\0{path.stat().st_mode:o}\0{_sha256(path)}\n".encode())
    return state.hexdigest()[:16]


def _keep(wheel: Wheel, directory: Path) -> None:
    """Put a wheel into the cache, in the place of older ones of the package; one that cannot be written has none."""
    with contextlib.suppress(OSError):
        directory.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=directory.parent, prefix=".part-") as part:
            Path(part, wheel.name).write_bytes(wheel.content)
            Path(part, wheel.name).replace(directory / wheel.name)
        for old in directory.parent.glob(f"{directory.name.rpartition('-')[0]}-*"):
            if old != directory:
                shutil.rmtree(old, ignore_errors=True)


@functools.cache
def installer() -> Mapping[str, bytes]:
    """Return the modules of pypa/installer as this process would import them, by path. Raises BuildError."""
    modules = [path for path in importlib.metadata.files("installer") or () if path.suffix == ".py"]
    if not any(path.name == "__main__.py" for path in modules):
        raise BuildError(
            "the package `installer` is not whole here. What to do: pip install --force-reinstall installer"
        )
    return {str(path): Path(str(path.locate())).read_bytes() for path in modules}


def at_hand(pins: Iterable[Pin], directories: Iterable[Path]) -> Iterator[Path]:
    """Yield the files in `directories` that are locked: same name, version and SHA-256."""
    for _, path in found(pins, directories):
        yield path


def found(pins: Iterable[Pin], directories: Iterable[Path]) -> Iterator[tuple[Pin, Path]]:
    """Yield them after the pins that they are."""
    wanted = {(pin.name, Version(pin.version)): pin for pin in pins}
    for directory in directories:
        for path in sorted(directory.glob("*.whl")):
            try:
                name, version, _, _ = parse_wheel_filename(path.name)
            except InvalidWheelFilename:
                continue
            pin = wanted.get((canonicalize_name(name), version))
            if pin and _sha256(path) == pin.sha256:
                yield pin, path


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
