"""Lock files: the exact files, with hashes, that a layer of an image is made of."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import SpecError
from shoal.matrix.project import CHILD_LAYERS, LAYERS, Project
from shoal.matrix.spec import BuildSpec, ImageSpec

_LINE = re.compile(r"^(?P<name>\S+)==(?P<version>\S+) --hash=sha256:(?P<sha256>[0-9a-f]{64})$")


@dataclass(frozen=True)
class Pin:
    """One locked file: canonical name, version, SHA-256 (hexadecimal)."""

    name: str
    version: str
    sha256: str

    def __str__(self) -> str:
        return f"{self.name}=={self.version} --hash=sha256:{self.sha256}"


def read_image(project: Project, spec: BuildSpec, image: ImageSpec) -> dict[str, tuple[Pin, ...]]:
    """Return the image's pins by layer. Raises `SpecError` when a lock is missing or made for other requirements."""
    directory = project.lock_directory(image)
    return {
        layer: tuple(read_lock(directory / f"{layer}.txt", asked(project, spec, image, layer)))
        for layer in (CHILD_LAYERS if image.extends else LAYERS)
    }


def are_for(project: Project, spec: BuildSpec, image: ImageSpec) -> bool:
    """Whether the image's locks are there, and made for what is asked for now."""
    try:
        read_image(project, spec, image)
    except SpecError:
        return False
    return True


def installed(project: Project, spec: BuildSpec, image: ImageSpec) -> Iterator[Pin]:
    """Yield what is installed in an image, from its parents on."""
    if parent := spec.parent(image):
        yield from installed(project, spec, parent)
    for pins in read_image(project, spec, image).values():
        yield from pins


def asked(project: Project, spec: BuildSpec, image: ImageSpec, layer: str) -> str:
    """Return what is asked for, as the first line of a lock file; for a child also on what, which another lock says."""
    if parent := spec.parent(image):
        given = "\n".join(map(str, installed(project, spec, parent)))
        on = f"on {parent.tag} ({hashlib.sha256(given.encode()).hexdigest()[:12]})"
        return f"# Made by `shoal lock` for: {' '.join(image.requirements)} {on}"
    requirements = [*image.requirements, *spec.mpi, *(spec.aws if layer == "aws" else ())]
    return f"# Made by `shoal lock` for: {' '.join(requirements)}".rstrip()


def read_lock(path: Path, asked: str | None = None) -> list[Pin]:
    """Return the pins of a lock file; its first line must be `asked`. Raises `SpecError` naming the file and line."""
    try:
        lines = path.read_text().splitlines()
    except FileNotFoundError:
        raise SpecError(f"{path}: missing. Make it: .venv/bin/shoal lock <tag>") from None
    if asked is not None and lines[:1] != [asked]:
        raise SpecError(
            f"{path}:1: made for other requirements than are asked for now. Run: .venv/bin/shoal lock <tag>"
        )
    pins = []
    for number, line in enumerate(lines, 1):
        if not line or line.startswith("#"):
            continue
        match = _LINE.match(line)
        if not match:
            raise SpecError(f"{path}:{number}: expected 'name==version --hash=sha256:…', found {line!r}")
        pins.append(Pin(**match.groupdict()))
    return pins
