"""Asks the package indexes which releases there are, with the settings of pip on this machine. Downloads no package."""

from __future__ import annotations

import functools
import json
import subprocess
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import Version

from shoal.errors import ShoalError
from shoal.network.settings import pip_environment, read_pip_settings
from shoal.sources.lock import UNREACHABLE, pip_command, target_options

# `pip index versions` prints one package, without yanked files, sizes and wheels for another Python. So this program
# prints every wheel that pip judges. pip takes no size from an index, so it is read beside it.
_LIST = """
import json, os
from pip._internal.cli import cmdoptions
from pip._internal.commands.index import IndexCommand
from pip._internal.index.package_finder import LinkEvaluator, LinkType
from pip._internal.models.link import Link
sizes, files, names = {}, [], []
from_json, evaluate_link = Link.from_json.__func__, LinkEvaluator.evaluate_link
def note_size(cls, entry, page):
    link = from_json(cls, entry, page)
    if link is not None:
        sizes[link.url_without_fragment] = entry.get("size")
    return link
def note_file(self, link):
    judged = evaluate_link(self, link)
    if link.is_wheel:
        if link.is_file:
            sizes[link.url_without_fragment] = os.path.getsize(link.file_path)
        usable, digest = judged[0] == LinkType.candidate, link._hashes.get("sha256", "")
        files.append((names[-1], link.filename, usable, link.is_yanked, digest, sizes.get(link.url_without_fragment)))
    return judged
def list_files(self, options, args):
    with self._build_session(options) as session:
        finder = self._build_package_finder(
            options=options, session=session, target_python=cmdoptions.make_target_python(options),
            ignore_requires_python=False
        )
        for name in args:
            names.append(name)
            finder.find_all_candidates(name)
    print(json.dumps(files))
Link.from_json, LinkEvaluator.evaluate_link = classmethod(note_size), note_file
IndexCommand.get_available_package_versions = list_files
"""


@dataclass(frozen=True)
class Wheel:
    """A wheel of an index."""

    version: Version
    usable: bool
    """Whether images with the Python that was asked for can install it."""
    yanked: bool
    sha256: str
    """Hexadecimal; empty if the index does not name it."""
    size: int | None
    """In bytes, if the index names it."""


@dataclass(frozen=True)
class IndexPackage:
    """A package that is pinned now."""

    name: str
    version: Version
    index: str | None = None
    """The address of an index that is asked too."""


@dataclass(frozen=True)
class Newest:
    """The newest release that can be taken, and a newer one that cannot."""

    version: Version | None
    """None if nothing later can be taken."""
    left: str = ""
    """A still newer one with the reason why it cannot be taken; empty without one."""


class Indexes:
    """The package indexes of this machine. Each question is asked once."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str, str | None], list[Wheel]] = {}
        self.unreachable: set[str] = set()
        """Addresses of further indexes that did not answer."""

    def list_wheels(
        self, names: Iterable[str], python_version: str, index: str | None = None
    ) -> Mapping[str, list[Wheel]]:
        """Returns the wheels of packages by name. The `index` is asked too, if it can be reached.

        Raises `ShoalError` if an index of pip's configuration cannot be reached.
        """
        wanted = list(dict.fromkeys(names))
        if new := [name for name in wanted if (name, python_version, index) not in self._known]:
            found = _ask(new, python_version)
            if index and index not in self.unreachable:
                try:
                    found = _ask(new, python_version, "--extra-index-url", index)
                except ShoalError:
                    self.unreachable.add(index)
            for name in new:
                self._known[name, python_version, index] = found.get(name, [])
        return {name: self._known[name, python_version, index] for name in wanted}

    def find_newest(
        self, package: IndexPackage, python_versions: Collection[str], same: tuple[int, ...] = ()
    ) -> Newest:
        """Returns the newest later release with a wheel for all these Pythons. It obeys pip's constraints too.

        Args:
            package: The present release.
            python_versions: Such as 3.11.
            same: The first numbers that the version must have.
        """
        name, now = package.name, package.version
        lists = [(python, self.list_wheels([name], python, package.index)[name]) for python in python_versions]
        versions = {wheel.version for _, wheels in lists for wheel in wheels}
        left = ""
        for version in sorted((version for version in versions if version > now), reverse=True):
            if version.local != now.local:
                continue
            reason = _find_obstacle(name, version, lists)
            if version.release[: len(same)] != same:
                reason = reason or "it may not be compatible"
            if not reason:
                return Newest(version, left)
            left = left or f"{name} {version} is not taken: {reason}"
        return Newest(None, left)


def _find_obstacle(name: str, version: Version, lists: Iterable[tuple[str, list[Wheel]]]) -> str:
    """Returns why a version cannot be taken; empty if it can."""
    if version.is_prerelease:
        return "it is a pre-release"
    allowed = _read_constraints().get(canonicalize_name(name), SpecifierSet())
    if not allowed.contains(version):
        return f"pip's constraint on this machine is {name}{allowed}"
    for python, wheels in lists:
        of_version = [wheel for wheel in wheels if wheel.version == version]
        if of_version and all(wheel.yanked for wheel in of_version):
            return "it was yanked"
        if not any(wheel.usable for wheel in of_version):
            return f"it has no wheel for Python {python} on Linux and x86_64"
    return ""


def _ask(names: list[str], python_version: str, *options: str) -> dict[str, list[Wheel]]:
    """Raises `ShoalError` if an index cannot be reached, or with pip's words."""
    command = [*pip_command(first=_LIST), "index", "versions", "--retries=1", *options]
    command += [*target_options(python_version), *names]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=pip_environment())
    if UNREACHABLE.search(result.stderr):
        raise ShoalError(
            f"a package index cannot be reached, to ask for {' '.join(names)}:\n{result.stderr.strip()}\n"
            "Fix: check the network and the indexes: shoal doctor, pip config list"
        )
    if result.returncode:
        raise ShoalError(f"pip cannot list {' '.join(names)}:\n{result.stderr.strip()}\nFix: shoal doctor")
    found: dict[str, list[Wheel]] = {name: [] for name in names}
    for name, file, *facts in json.loads(result.stdout.splitlines()[-1]):
        try:
            version = parse_wheel_filename(file)[1]
        except InvalidWheelFilename:
            continue
        found[name].append(Wheel(version, *facts))
    return found


@functools.cache
def _read_constraints() -> dict[str, SpecifierSet]:
    """Returns pip's constraints on this machine by package. pip itself reads the rest, such as addresses."""
    found: dict[str, SpecifierSet] = {}
    for file in read_pip_settings().get("constraint", "").split():
        path = Path(file)
        for line in path.read_text().splitlines() if path.is_file() else ():
            try:
                requirement = Requirement(line.partition(" #")[0])
            except InvalidRequirement:
                continue
            name = canonicalize_name(requirement.name)
            found[name] = found.get(name, SpecifierSet()) & requirement.specifier
    return found
