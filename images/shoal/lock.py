"""Resolves an image's requirements to exact files with hashes, one lock file a layer: `shoal lock`.

pip does the resolving (`--dry-run --report`), on a machine with the image's Python and platform.
"""

from __future__ import annotations

import json
import platform
import re
import subprocess
import sys
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from shoal.errors import SpecError
from shoal.project import LAYERS, Project
from shoal.spec import BuildSpec, ImageSpec

_PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in range(36, 4, -1)] + [
    "manylinux2014_x86_64",
    "manylinux2010_x86_64",
    "manylinux1_x86_64",
]
_LINE = re.compile(r"^(?P<name>\S+)==(?P<version>\S+) --hash=sha256:(?P<sha256>[0-9a-f]{64})$")


@dataclass(frozen=True)
class Pin:
    """One locked file: canonical name, version, SHA-256 (hexadecimal)."""

    name: str
    version: str
    sha256: str

    def __str__(self) -> str:
        return f"{self.name}=={self.version} --hash=sha256:{self.sha256}"


def lock_image(project: Project, spec: BuildSpec, image: ImageSpec) -> list[Path]:
    """Resolve and write the image's lock files; return them. Raises `SpecError` with pip's words when it fails."""
    index = spec.indexes[image.index] if image.index else None
    pins = _resolve([*image.requirements, *spec.mpi], image.python_version, index)
    mpi = {canonicalize_name(Requirement(line).name) for line in spec.mpi}
    layers: dict[str, list[Pin]] = {layer: [] for layer in LAYERS}
    for pin in pins:
        layers[_layer_of(pin.name, mpi)].append(pin)
    if spec.aws:  # its own wishes change nothing of the layers below it
        given = [f"{pin.name}=={pin.version}" for pin in pins]
        layers["aws"] = [pin for pin in _resolve([*given, *spec.aws], image.python_version, index) if pin not in pins]
    directory = project.lock_directory(image)
    directory.mkdir(parents=True, exist_ok=True)
    return [_write(directory / f"{layer}.txt", _asked(spec, image, layer), pins) for layer, pins in layers.items()]


def read_image(project: Project, spec: BuildSpec, image: ImageSpec) -> dict[str, tuple[Pin, ...]]:
    """Return the image's pins by layer. Raises `SpecError` when a lock is missing or made for other requirements."""
    directory = project.lock_directory(image)
    return {layer: tuple(read_lock(directory / f"{layer}.txt", _asked(spec, image, layer))) for layer in LAYERS}


def _asked(spec: BuildSpec, image: ImageSpec, layer: str) -> str:
    """Return what buildspec.yml asks for, as the first line of a lock file."""
    requirements = [*image.requirements, *spec.mpi, *(spec.aws if layer == "aws" else ())]
    return f"# Made by `shoal lock` for: {' '.join(requirements)}".rstrip()


def read_lock(path: Path, asked: str | None = None) -> list[Pin]:
    """Return the pins of a lock file; its first line must be `asked`. Raises `SpecError` naming the file and line."""
    try:
        lines = path.read_text().splitlines()
    except FileNotFoundError:
        raise SpecError(f"{path}: missing. Make it: .venv/bin/shoal lock <tag>") from None
    if asked is not None and lines[:1] != [asked]:
        raise SpecError(f"{path}:1: made for other requirements than buildspec.yml's. Run: .venv/bin/shoal lock <tag>")
    pins = []
    for number, line in enumerate(lines, 1):
        if not line or line.startswith("#"):
            continue
        match = _LINE.match(line)
        if not match:
            raise SpecError(f"{path}:{number}: expected 'name==version --hash=sha256:…', found {line!r}")
        pins.append(Pin(**match.groupdict()))
    return pins


def _resolve(requirements: Iterable[str], python_version: str, index: str | None) -> list[Pin]:
    """Return the files that pip chooses, sorted by name."""
    here = (platform.system(), platform.machine(), f"{sys.version_info[0]}.{sys.version_info[1]}")
    if here != (
        "Linux",
        "x86_64",
        python_version,
    ):  # pip picks files for another machine, but reads markers on this one
        raise SpecError(f"locking needs Linux, x86_64 and Python {python_version}; this is {' '.join(here)}")
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet", "--report", "-"]
    command += ["--only-binary=:all:", "--implementation=cp", f"--python-version={python_version}", "--target=unused"]
    command += [f"--platform={name}" for name in _PLATFORMS]
    result = subprocess.run([*command, *requirements], capture_output=True, text=True, check=False)
    if result.returncode and index:  # the extra index only where pip's own configuration does not hold the file
        command += ["--extra-index-url", index]
        result = subprocess.run([*command, *requirements], capture_output=True, text=True, check=False)
    if result.returncode:
        raise SpecError(f"pip cannot resolve {' '.join(requirements)}:\n{result.stderr.strip()}")
    return sorted(map(_pin, json.loads(result.stdout)["install"]), key=lambda pin: pin.name)


def _pin(entry: dict[str, Any]) -> Pin:
    metadata = entry["metadata"]
    digest = entry["download_info"]["archive_info"]["hashes"]["sha256"]
    return Pin(canonicalize_name(metadata["name"]), metadata["version"], digest)


def _layer_of(name: str, mpi: Collection[str]) -> str:
    if name in mpi:
        return "mpi"
    return "cuda" if name.startswith("nvidia-") else "framework"


def _write(path: Path, asked: str, pins: Iterable[Pin]) -> Path:
    lines = [asked, *map(str, pins)]
    path.write_text("\n".join(lines) + "\n")
    return path
