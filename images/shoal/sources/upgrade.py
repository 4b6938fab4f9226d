"""Takes newer releases into buildspec.yml and dockerfiles/versions.yml, and keeps their comments: `shoal upgrade`.

A tag is a promise to its users. So a new minor release of a framework gets an entry beside the old one. Scripts are
written for the old one, and its CUDA may be another. A patch release replaces its entry. So does a release of a child
within its major release, because there is one each week. Releases that an entry's `hold` keeps out, or that may not be
compatible, are only named.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from packaging.utils import canonicalize_name
from packaging.version import Version

from shoal.errors import SpecError
from shoal.matrix import selectors, spec, yaml_file
from shoal.matrix.project import Project
from shoal.matrix.spec import BuildFile, BuildSpec, Child, ImageSpec, Release, VersionsFile
from shoal.sources import lock, yaml_text
from shoal.sources.releases import Indexes, IndexPackage

_PIN = re.compile(r"(?P<name>[\w.-]+)(?P<extras>\[[\w, .-]+\])?(?P<equals>===?)(?P<version>[\w.+!]+)", re.ASCII)
_PARTS = ("mpi", "aws", "everyday")
"""The parts of buildspec.yml that list requirements."""


class PinnedLine(NamedTuple):
    """A requirement of one exact version, such as `torch==2.13.0+cpu`."""

    name: str
    extras: str
    equals: str
    version: Version

    def at(self, version: object) -> str:
        return f"{self.name}{self.extras}{self.equals}{version}"


@dataclass(frozen=True)
class EntryChange:
    """A requirement in buildspec.yml or versions.yml that has a newer release."""

    place: str
    """The part of buildspec.yml, or the framework, version and device of an entry."""
    before: str
    after: str
    beside: bool
    """Whether an entry was added, instead of one replaced."""

    def __str__(self) -> str:
        return f"{self.place}: {self.before} {'and, beside it,' if self.beside else '→'} {self.after}"


def read_pin(line: str) -> PinnedLine | None:
    """Returns the parts of a requirement if it allows one version only."""
    match = _PIN.fullmatch(line.replace(" ", ""))
    if not match:
        return None
    return PinnedLine(match["name"], match["extras"] or "", match["equals"], Version(match["version"]))


def edit_files(project: Project, wanted: Iterable[str], indexes: Indexes) -> tuple[list[EntryChange], list[str]]:
    """Writes newer releases into the files of a project, and returns them with sentences on the others.

    Raises `ShoalError` if an index cannot be reached, and `SpecError` if a file is wrong or cannot be edited.

    Args:
        project: Its locks do not fit afterwards.
        wanted: The packages to ask for; all if there are none.
        indexes: The package indexes.
    """
    edit = _Edit(project, frozenset(map(canonicalize_name, wanted)), indexes)
    edit.ask_all()
    for step in (edit.upgrade_common, edit.upgrade_releases, edit.upgrade_children):
        edit.read()
        step()
    return edit.changes, list(dict.fromkeys(edit.notes))


@contextlib.contextmanager
def copy_project(project: Project) -> Iterator[Project]:
    """Copies the definitions of images, in which an upgrade is tried: if it fails, nothing has changed."""
    with tempfile.TemporaryDirectory(prefix="shoal-upgrade-") as directory:
        copy = Project(Path(directory))
        shutil.copy(project.buildspec, copy.buildspec)
        shutil.copytree(project.templates, copy.templates)
        yield copy


def write_back(copy: Project, project: Project, before: BuildSpec, after: BuildSpec) -> None:
    """Writes the changes in a copy into its project. Removes the locks and Dockerfiles of images that are gone."""
    for path in (copy.buildspec, *(path for path in copy.templates.rglob("*") if path.is_file())):
        target = project.root / path.relative_to(copy.root)
        if not target.exists() or target.read_bytes() != path.read_bytes():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    for gone in _list_directories(project, before) - _list_directories(project, after):
        shutil.rmtree(gone, ignore_errors=True)


def _list_directories(project: Project, matrix: BuildSpec) -> set[Path]:
    """Returns the directories with files of the images: locks and Dockerfiles."""
    locks = {project.lock_directory(image) for image in matrix.images}
    return locks | {project.rendered(image).parent for image in matrix.images}


class _Edit:
    def __init__(self, project: Project, wanted: frozenset[str], indexes: Indexes) -> None:
        self._buildspec, self._path = project.buildspec, project.root / spec.VERSIONS
        self._wanted, self._indexes = wanted, indexes
        self.changes: list[EntryChange] = []
        self.notes: list[str] = []
        self.read()

    def read(self) -> None:
        """Reads the files again, after a step has edited them."""
        self._spec = spec.load(self._buildspec)
        self._file, _ = yaml_file.read_yaml(self._buildspec, BuildFile)
        self._versions, _ = yaml_file.read_yaml(self._path, VersionsFile)

    def ask_all(self) -> None:
        """Asks for all packages at once: a start of pip takes longer than an answer."""
        common = filter(None, (read_pin(line) for part in _PARTS for line in getattr(self._file, part)))
        own = filter(None, map(_own_pin, (*self._versions.releases, *self._versions.children)))
        names = [pin.name for pin in (*common, *own) if self._is_wanted(pin)]
        for python in sorted({image.python_version for image in self._spec.images} if names else ()):
            self._indexes.list_wheels(names, python)

    def upgrade_common(self) -> None:
        """Replaces pins of buildspec.yml, within their major release."""
        pythons = {image.python_version for image in self._spec.images}
        for part in _PARTS:
            for pin in filter(None, map(read_pin, getattr(self._file, part))):
                package = IndexPackage(pin.name, pin.version)
                if self._is_wanted(pin) and (version := self._find(package, pythons, 1)):
                    yaml_text.replace_words(self._buildspec, {pin.at(pin.version): pin.at(version)})
                    self._add_change(part, pin, version, beside=False)

    def upgrade_releases(self) -> None:
        """Adds an entry for a new minor release of the newest one for a device. Replaces patch releases."""
        for number, release in reversed(list(enumerate(self._versions.releases))):  # so that numbers stay
            images = [image for image in self._spec.images if _is_of_release(image, release)]
            pin = _own_pin(release)
            if not pin or not images or not self._is_wanted(pin):
                continue
            package = IndexPackage(pin.name, pin.version, self._address(release))
            if self._is_newest(release) and (better := self._find_minor(release, package)):
                version, place = better
                moved = [image.model_copy(update=place) for image in images]
                self._write_release(number, images, moved, version, beside=True)
            pythons = {image.python_version for image in images}
            if not release.hold and (patch := self._find(package, pythons, 2, quiet=True)):
                self._write_release(number, images, images, patch, beside=False)

    def upgrade_children(self) -> None:
        """Replaces the releases of children, within their major release."""
        for number, child in reversed(list(enumerate(self._versions.children))):
            images = [image for image in self._spec.images if _is_of_child(image, child)]
            pin = _own_pin(child)
            if child.hold or not pin or not images or not self._is_wanted(pin):
                continue
            package = IndexPackage(pin.name, pin.version, self._address(child))
            if version := self._find(package, {image.python_version for image in images}, 1):
                edits = {pin.at(pin.version): pin.at(version), f"version: {child.version}": f"version: {version}"}
                yaml_text.edit_entry(self._path, self._line_of("children", number), edits)
                self._rename(images, [image.model_copy(update={"version": str(version)}) for image in images])
                self._add_change(f"{child.framework} on {child.extends}", pin, version, beside=False)

    def _is_wanted(self, pin: PinnedLine) -> bool:
        return not self._wanted or canonicalize_name(pin.name) in self._wanted

    def _address(self, entry: Release | Child) -> str | None:
        return self._file.indexes[entry.index] if entry.index else None

    def _find(
        self, package: IndexPackage, pythons: Collection[str], numbers: int, *, quiet: bool = False
    ) -> Version | None:
        """Returns a later release with the same first numbers of its version. Notes another that is newer."""
        found = self._indexes.find_newest(package, pythons, package.version.release[:numbers])
        if found.left and not quiet:
            self.notes.append(found.left)
        return found.version

    def _is_newest(self, release: Release) -> bool:
        kind = (release.framework, release.device)
        others = (other for other in self._versions.releases if (other.framework, other.device) == kind)
        return Version(release.version) == max(Version(other.version) for other in others)

    def _find_minor(self, release: Release, package: IndexPackage) -> tuple[Version, dict[str, Any]] | None:
        """Returns the newest release with another minor number, and the last system that has a wheel of it."""
        best: tuple[Version, dict[str, Any]] | None = None
        systems = {image.os: image.system for image in self._spec.images}
        for name, system in ((name, systems[name]) for name in self._versions.systems if name in systems):
            found = self._find(package, [f"3.{system.python.removeprefix('py3')}"], 0)
            if found and (best is None or found >= best[0]):
                best = found, {"os": name, "system": system, "python": system.python}
        if best is None or best[0].release[:2] == package.version.release[:2]:
            return None
        if release.hold:
            self.notes.append(f"{package.name} {best[0]} is not taken: {release.version} is held: {release.hold}")
            return None
        return best

    def _write_release(
        self, number: int, images: list[ImageSpec], moved: list[ImageSpec], version: Version, *, beside: bool
    ) -> None:
        """Edits or adds an entry. pip resolves its other pins and its CUDA. A conflict becomes a note."""
        release = self._versions.releases[number]
        pin = _own_pin(release)
        assert pin
        lines = {line: _relax(line, pin, version) for line in (*release.requirements, *release.everyday)}
        update: dict[str, Any] = {
            "version": version.public,
            "requirements": tuple(map(lines.get, release.requirements)),
        }
        update["everyday"] = tuple(lines.get(line, line) for line in images[0].everyday)
        try:
            layers = lock.resolve_layers(self._spec, moved[0].model_copy(update=update), self._address(release))
        except SpecError as error:
            self.notes.append(f"{pin.name} {version} is not taken: {error}")
            return
        resolved = {found.name: found.version for pins in layers.values() for found in pins}
        cuda = release.cuda and (_read_cuda(resolved) or release.cuda)
        edits = {line: _pin_again(line, relaxed, resolved) for line, relaxed in lines.items()}
        edits |= {f"version: {release.version}": f"version: {version.public}", f"cuda: {release.cuda}": f"cuda: {cuda}"}
        place = moved[0].os if beside else ""
        yaml_text.edit_entry(self._path, self._line_of("releases", number), edits, beside=beside, system=place)
        self._rename(images, [image.model_copy(update={"version": version.public, "cuda": cuda}) for image in moved])
        self._add_change(f"{release.framework} {release.device}", pin, version, beside=beside)
        self._move_children(release, version.public, beside=beside and cuda != release.cuda)

    def _move_children(self, release: Release, version: str, *, beside: bool) -> None:
        """Lets children that name a release and its device extend the new one.

        Children of the old release stay beside them if their tags differ, which name the CUDA version only.
        """
        versions, _ = yaml_file.read_yaml(self._path, VersionsFile)
        old, new = (f"{release.framework}-training:{each}-" for each in (release.version, version))
        stays = any(f"{entry.framework}-training:{entry.version}-" == old for entry in versions.releases)
        for number, child in reversed(list(enumerate(versions.children))):
            if child.hold or not child.extends.startswith(old):
                continue
            if stays and not child.extends.startswith(f"{old}{release.device}-"):
                self.notes.append(f"{child.framework} {child.version} stays on {child.extends}: it names no device")
                continue
            edits = {child.extends: child.extends.replace(old, new)}
            yaml_text.edit_entry(self._path, self._line_of("children", number), edits, beside=beside)

    def _rename(self, images: Iterable[ImageSpec], renamed: Iterable[ImageSpec]) -> None:
        """Lets names of buildspec.yml mean the new images."""
        yaml_text.replace_words(
            self._buildspec, {image.tag: new.tag for image, new in zip(images, renamed)}, required=False
        )

    def _line_of(self, key: str, number: int) -> int:
        return yaml_file.read_yaml(self._path, VersionsFile)[1].line_of((key, number))

    def _add_change(self, place: str, pin: PinnedLine, version: Version, *, beside: bool) -> None:
        self.changes.append(EntryChange(place, pin.at(pin.version), pin.at(version), beside))


def _own_pin(entry: spec.Needs) -> PinnedLine | None:
    """Returns the requirement that has the version of the entry."""
    pins = filter(None, map(read_pin, entry.requirements))
    return next((pin for pin in pins if pin.version.public == Version(entry.version).public), None)


def _is_of_release(image: ImageSpec, release: Release) -> bool:
    return all(getattr(image, field) == getattr(release, field) for field in ("framework", "version", "device", "cuda"))


def _is_of_child(image: ImageSpec, child: Child) -> bool:
    kind = (child.framework, child.version)
    return (image.framework, image.version) == kind and selectors.matches(child.extends, image.extends or "")


def _relax(line: str, own: PinnedLine, version: Version) -> str:
    """Returns a requirement of an entry for a new version of its own. Other pins have no version then."""
    pin = read_pin(line)
    if not pin:
        return line
    return pin.at(version) if pin == own else f"{pin.name}{pin.extras}"


def _pin_again(line: str, relaxed: str, resolved: Mapping[str, str]) -> str:
    """Pins a requirement to the version that pip has chosen. One that is still pinned, or never was, stays relaxed."""
    pin = read_pin(line)
    return pin.at(resolved[canonicalize_name(pin.name)]) if pin and not read_pin(relaxed) else relaxed


def _read_cuda(resolved: Mapping[str, str]) -> str | None:
    """Returns the CUDA version of packages, such as cu130; None if they have none."""
    for name, version in resolved.items():
        if name == "cuda-toolkit" or name.startswith("nvidia-cuda-runtime"):
            return "cu{}{}".format(*Version(version).release[:2])
    return None
