"""Finds the owners of an image's files: Debian packages by dpkg's lists, Python distributions by their RECORD.

It also lists the installed packages and distributions, with their versions.
"""

from __future__ import annotations

import contextlib
import csv
import io
import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from email.parser import HeaderParser
from typing import Literal

from packaging.utils import canonicalize_name

from shoal.image.archive import Entry, replace_surrogates
from shoal.limits import MOST_METADATA, MOST_OWNERS, MOST_PATH

STATUS = "var/lib/dpkg/status"
_LIST = re.compile(r"var/lib/dpkg/info/([^/:]+)(:[^/]+)?\.list")
_DIST_INFO = re.compile(r"((?:.*/)?)([^/]+)\.dist-info/(METADATA|RECORD)")
_BYTECODE = re.compile(r"(.*/)?__pycache__/([^/]+?)\.[^/.]+(\.opt-[12])?\.pyc")
_FIELD = re.compile(r"^(Package|Status|Version|Architecture|Source): (.*)$", re.MULTILINE)
_OTHER_DEPTH = 4  # directories of a path that name a file without an owner
_MOST_STEPS = 256  # directories and links on one path: each is a level of Python's recursion


@dataclass(frozen=True, order=True)
class FileOwner:
    """The owner of a file: a Python distribution, a Debian package, or its directory."""

    kind: Literal["python", "debian", "other", "tar"]
    """`other`: a directory. `tar`: bytes of no file, such as headers of directories, whiteouts and ends of archives."""
    name: str


TAR = FileOwner("tar", "directories, whiteouts and ends of the layers' archives")
REST = FileOwner("other", "further packages and directories")
"""The owner of all files after the first `MOST_OWNERS` owners."""


@dataclass(frozen=True, order=True)
class DebianPackage:
    """An installed package, by dpkg's status."""

    name: str
    version: str
    architecture: str
    source: str
    """The source package; often the same name."""


@dataclass(frozen=True, order=True)
class PythonDistribution:
    """An installed distribution: its normalised name, its version, and the path of its *.dist-info."""

    name: str
    version: str
    path: str


class Owners:
    """Finds the owner of an entry, by the lists in the layers' entries, lowest layer first.

    Lists of lower layers count too: hidden files have owners. Debian's own Python distributions belong to Debian.
    """

    def __init__(self, layers: Iterable[Iterable[Entry]]) -> None:
        entries = [entry for layer in layers for entry in layer]
        self._tree = _Tree(entries)
        described = [(entry.path, entry.text) for entry in entries if entry.text is not None]
        self._claims: dict[str, FileOwner] = {}
        self._found: set[FileOwner] = set()
        # A distribution inside another (setuptools' _vendor) belongs to the outer one: deeper paths come first.
        for path, text in sorted(described, key=lambda item: -item[0].count("/")):
            self._claim_record(path, text)
        for path, text in described:
            self._claim_list(path, text)

    def find_owner(self, entry: Entry) -> FileOwner:
        """Returns the owner of an entry. Bytecode that no list has belongs to the owner of its source.

        Directories and whiteouts belong to `TAR`. Other files without a package belong to their directory: its
        first four levels. After many owners, all others are `REST`.
        """
        if entry.kind == "directory" or entry.is_whiteout:
            return TAR
        found = self._claims.get(entry.path)
        if found is None and (bytecode := _BYTECODE.fullmatch(entry.path)):
            found = self._claims.get(f"{bytecode[1] or ''}{bytecode[2]}.py")
        found = found or FileOwner("other", _directory_of(entry.path))
        if found not in self._found:
            if len(self._found) >= MOST_OWNERS:
                return REST
            self._found.add(found)
        return found

    def is_vendored(self, path: str, name: str) -> bool:
        """Returns whether the metadata at `path` belongs to an owner other than the distribution `name`."""
        return self._claims.get(path, FileOwner("python", name)) != FileOwner("python", name)

    def _claim_record(self, path: str, text: bytes) -> None:
        found = _DIST_INFO.fullmatch(path)
        if found and found[3] == "RECORD":
            owner = FileOwner("python", _name_and_version(found[2])[0])
            with contextlib.suppress(csv.Error):  # a field of an image may have any length
                for row in csv.reader(_lines(text)):
                    if row:
                        self._claim(posixpath.normpath(posixpath.join(found[1], row[0])).lstrip("/"), owner)

    def _claim_list(self, path: str, text: bytes) -> None:
        if found := _LIST.fullmatch(path):
            owner = FileOwner("debian", found[1])
            for line in _lines(text):
                self._claim(line.rstrip("\n").lstrip("/"), owner)

    def _claim(self, path: str, owner: FileOwner) -> None:
        if len(path) <= MOST_PATH:  # no file has a longer one
            self._claims[self._tree.real(path)] = owner


class _Tree:
    """Follows symlinked directories: dpkg's lists have bin/ls, where bin is a link to usr/bin."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self._links: dict[str, str] = {}
        for entry in entries:
            if entry.kind == "symlink":
                self._links[entry.path] = entry.target
            else:
                self._links.pop(entry.path, None)
        self._known: dict[str, str] = {}

    def real(self, path: str) -> str:
        directory, _, name = path.rpartition("/")
        return posixpath.join(self._directory(directory, 0), name)

    def _directory(self, path: str, steps: int) -> str:
        """Keeps results in `_known`: all links must be known before the first call. A very long way is not followed."""
        if not path or steps > _MOST_STEPS or len(path) > MOST_PATH:
            return path
        if path not in self._known:
            parent, _, name = path.rpartition("/")
            above = self._directory(parent, steps + 1)
            here = posixpath.join(above, name)
            if here in self._links:
                target = posixpath.normpath(posixpath.join(above, self._links[here])).lstrip("/")
                here = self._directory("" if target == "." else target, steps + 1)
            self._known[path] = here
        return self._known[path]


def debian_packages(status: bytes) -> Iterator[DebianPackage]:
    """Yields the packages that dpkg's status, the content of `STATUS`, lists as installed."""
    for stanza in re.split(r"\n\s*\n", _replace_errors(status)):
        fields: dict[str, str] = dict(_FIELD.findall(stanza))
        name = fields.get("Package")
        if name is not None and fields.get("Status", "").endswith(" installed"):
            source = fields.get("Source", name).split(" ")[0]
            yield DebianPackage(name, fields.get("Version", ""), fields.get("Architecture", ""), source)


def python_distributions(texts: Mapping[str, bytes], owners: Owners) -> Iterator[PythonDistribution]:
    """Yields the distributions that have a METADATA among the texts, which are by path. Vendored ones are left out."""
    for path, text in texts.items():
        found = _DIST_INFO.fullmatch(path)
        if found and found[3] == "METADATA":
            name, version = _name_and_version(found[2])
            if not owners.is_vendored(path, name):
                said = HeaderParser().parsestr(_replace_errors(text[:MOST_METADATA])).get("Version", version)
                yield PythonDistribution(name, said.strip(), replace_surrogates(posixpath.dirname(path)))


def _name_and_version(directory: str) -> tuple[str, str]:
    name, _, version = directory.partition("-")
    return canonicalize_name(replace_surrogates(name)), version


def _directory_of(path: str) -> str:
    """Returns the directories that name the owner of a file without a package; "/" for a file in the root."""
    directories = path.split("/")[:-1]
    return replace_surrogates("/".join(directories[:_OTHER_DEPTH]) or "/")


def _lines(text: bytes) -> Iterator[str]:
    """Yields the lines of a text with their ends. Bytes that are not UTF-8 are decoded as tarfile does it in paths."""
    return io.TextIOWrapper(io.BytesIO(text), "utf-8", "surrogateescape")


def _replace_errors(text: bytes) -> str:
    return text.decode("utf-8", "replace")
