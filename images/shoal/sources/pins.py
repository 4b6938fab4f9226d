"""Reads lock files: the exact wheels, with hashes, of a layer of an image, and finds them in local directories.

It also makes their first lines, which show whether a lock is for the current requirements.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from shoal.errors import SpecError
from shoal.limits import read_project_file
from shoal.matrix.project import CHILD_LAYERS, LAYERS, Project
from shoal.matrix.spec import BuildSpec, ImageSpec

# No address and no option: pip reads these lines on this machine too, and would build what an address names.
_LINE = re.compile(
    r"(?P<name>[a-z0-9]+(-[a-z0-9]+)*)==(?P<version>[\w.!+-]{1,100}) --hash=sha256:(?P<sha256>[0-9a-f]{64})", re.ASCII
)


@dataclass(frozen=True)
class Pin:
    """One locked file: canonical name, version, SHA-256 (hexadecimal)."""

    name: str
    version: str
    sha256: str

    def __str__(self) -> str:
        return f"{self.name}=={self.version} --hash=sha256:{self.sha256}"


def read_image_pins(project: Project, spec: BuildSpec, image: ImageSpec) -> dict[str, tuple[Pin, ...]]:
    """Returns the image's pins by layer. Raises `SpecError` if a lock is missing or made for other requirements."""
    directory = project.lock_directory(image)
    tag = f"{image.repository}:{image.runtime_version_tag}"  # its variants have the same locks
    return {
        layer: tuple(read_lock(directory / f"{layer}.txt", make_header(project, spec, image, layer), tag))
        for layer in layers_of(image)
    }


def layers_of(image: ImageSpec) -> tuple[str, ...]:
    """Returns the names of the image's pip layers."""
    return CHILD_LAYERS if image.extends else LAYERS if image.everyday else LAYERS[:-1]


def are_current(project: Project, spec: BuildSpec, image: ImageSpec) -> bool:
    """Returns whether the image has locks, made for its current requirements."""
    return not _find_problem(project, spec, image)


def find_stale(project: Project, spec: BuildSpec, images: Iterable[ImageSpec]) -> list[str]:
    """Returns the problems of the locks of images, each once with its fix. Needs no network."""
    problems = dict.fromkeys(map(functools.partial(_find_problem, project, spec), images))
    return [problem for problem in problems if problem]


def _find_problem(project: Project, spec: BuildSpec, image: ImageSpec) -> str:
    try:
        read_image_pins(project, spec, image)
    except SpecError as error:
        return str(error)
    return ""


def list_installed(project: Project, spec: BuildSpec, image: ImageSpec) -> Iterator[Pin]:
    """Yields the pins of all that is installed in an image, its parents' first.

    Raises `SpecError` if a lock is missing, wrong, or made for other requirements.
    """
    if parent := spec.parent(image):
        yield from list_installed(project, spec, parent)
    for pins in read_image_pins(project, spec, image).values():
        yield from pins


def make_header(project: Project, spec: BuildSpec, image: ImageSpec, layer: str) -> str:
    """Returns the first line of a lock file: its requirements, and for a child image a digest of its parent's pins.

    Raises `SpecError` if a parent's lock is missing or wrong.
    """
    if parent := spec.parent(image):
        installed = "\n".join(map(str, list_installed(project, spec, parent)))
        on = f"on {parent.tag} ({hashlib.sha256(installed.encode()).hexdigest()[:12]})"
        return f"# Made by `shoal lock` for: {' '.join(image.requirements)} {on}"
    upper = {"aws": spec.aws, "everyday": (*spec.aws, *image.everyday)}.get(layer, ())
    return f"# Made by `shoal lock` for: {' '.join([*image.requirements, *spec.mpi, *upper])}".rstrip()


def read_lock(path: Path, header: str | None = None, tag: str = "<tag>") -> list[Pin]:
    """Returns the pins of the lock file of an image.

    Raises `SpecError` with the line if it is missing, wrong or lacks `header`.
    """
    try:
        lines = read_project_file(path).splitlines()
    except FileNotFoundError:
        raise SpecError(f"{path}: missing. Fix: shoal lock {tag}") from None
    if header is not None and lines[:1] != [header]:
        raise SpecError(f"{path}:1: made for other requirements than are asked for now. Fix: shoal lock {tag}")
    pins = []
    for number, line in enumerate(lines, 1):
        if not line or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        if not match or not _is_version(match["version"]):
            raise SpecError(
                f"{path}:{number}: expected 'name==version --hash=sha256:…', found {line!r}. Fix: shoal lock"
            )
        pins.append(Pin(**match.groupdict()))
    return pins


def _is_version(text: str) -> bool:
    try:
        return bool(Version(text))
    except InvalidVersion:
        return False


def find_locked_wheels(pins: Iterable[Pin], directories: Iterable[Path]) -> Iterator[tuple[Pin, Path]]:
    """Yields the wheels in `directories` that are locked, each after its pin: same name, version and SHA-256.

    The directories are pip's find-links directories, or the wheels of a bundle.
    """
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
