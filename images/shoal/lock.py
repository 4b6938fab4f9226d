"""Resolves an image's requirements to exact files with hashes, one lock file a layer: `shoal lock`.

pip does the resolving (`--dry-run --report`), for the image's Python and platform whatever this machine's are.
"""

from __future__ import annotations

import json
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
    report = _resolve([*image.requirements, *spec.mpi], image.python_version, index)
    mpi = {canonicalize_name(Requirement(line).name) for line in spec.mpi}
    layers: dict[str, list[Pin]] = {layer: [] for layer in LAYERS}
    for pin in sorted(map(_pin, report), key=lambda pin: pin.name):
        layers[_layer_of(pin.name, mpi)].append(pin)
    directory = project.lock_directory(image)
    directory.mkdir(parents=True, exist_ok=True)
    return [_write(directory / f"{layer}.txt", pins) for layer, pins in layers.items()]


def read_lock(path: Path) -> list[Pin]:
    """Return the pins of a lock file. Raises `SpecError` naming the file and line."""
    try:
        lines = path.read_text().splitlines()
    except FileNotFoundError:
        raise SpecError(f"{path}: missing. Make it: shoal lock") from None
    pins = []
    for number, line in enumerate(lines, 1):
        if not line or line.startswith("#"):
            continue
        match = _LINE.match(line)
        if not match:
            raise SpecError(f"{path}:{number}: expected 'name==version --hash=sha256:…', found {line!r}")
        pins.append(Pin(**match.groupdict()))
    return pins


def _resolve(requirements: Iterable[str], python_version: str, index: str | None) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet", "--report", "-"]
    command += ["--only-binary=:all:", "--implementation=cp", f"--python-version={python_version}", "--target=unused"]
    command += [f"--platform={platform}" for platform in _PLATFORMS]
    result = subprocess.run([*command, *requirements], capture_output=True, text=True, check=False)
    if result.returncode and index:  # the extra index only where pip's own configuration does not hold the file
        command += ["--extra-index-url", index]
        result = subprocess.run([*command, *requirements], capture_output=True, text=True, check=False)
    if result.returncode:
        raise SpecError(f"pip cannot resolve {' '.join(requirements)}:\n{result.stderr.strip()}")
    return list(json.loads(result.stdout)["install"])


def _pin(entry: dict[str, Any]) -> Pin:
    metadata = entry["metadata"]
    digest = entry["download_info"]["archive_info"]["hashes"]["sha256"]
    return Pin(canonicalize_name(metadata["name"]), metadata["version"], digest)


def _layer_of(name: str, mpi: Collection[str]) -> str:
    if name in mpi:
        return "mpi"
    return "cuda" if name.startswith("nvidia-") else "framework"


def _write(path: Path, pins: Iterable[Pin]) -> Path:
    lines = ["# Written by `shoal lock`; installed with pip --require-hashes --no-deps.", *map(str, pins)]
    path.write_text("\n".join(lines) + "\n")
    return path
