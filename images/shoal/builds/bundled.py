"""A bundle as a build reads it: a directory with all that they take from a network. bundle.py fills it.

A bundle travels, so it is checked before anything of it is used: every file against its SHA-256 in `SHA256SUMS`, and
that file, whose own digest is the bundle's, against the digest that `shoal bundle` printed, if the user gives it.
"""

from __future__ import annotations

import hashlib
import json
import re
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import IO, Any, Literal

import docker

from shoal.builds import base
from shoal.docker_client import archive
from shoal.errors import BundleError, UsageError
from shoal.matrix.spec import System
from shoal.network.settings import NetworkSettings

WHEELS = "wheels"
BASE, DEBS, INDEX = "base.tar", "debs", "Packages"
"""In the directory of a suite of Debian: the base image; packages, and among them what apt reads of them."""
SUMS = "SHA256SUMS"
"""In the bundle: the SHA-256 of every other file, as `sha256sum` writes and checks them."""
_SUM = re.compile(r"([0-9a-f]{64}) [ *](.+)")
_TOLD = 10
_REGISTRY = "docker.io/library/"
_NO_FILES = (FileExistsError, IsADirectoryError, NotADirectoryError)  # one path is a file and a directory
_DOCUMENTS = ("manifest.json", "repositories", "index.json")
_IMAGE_NAMES = ("io.containerd.image.name", "org.opencontainers.image.ref.name")


def write_sums(directory: Path) -> str:
    """Write `SHA256SUMS` of the files that are there. Returns its own SHA-256 (hexadecimal): the bundle's digest."""
    lines = [f"{_sha256(path)}  {name}\n" for name, path in sorted(_files(directory))]
    (directory / SUMS).write_text("".join(lines))
    return _sha256(directory / SUMS)


def check(directory: Path, expected: str | None) -> str:
    """Check every file of a bundle. Returns its digest.

    Args:
        expected: The digest that `shoal bundle` printed, with or without `sha256:` before it; None: not known here.

    Raises:
        UsageError: If the directory is no bundle.
        BundleError: If a file is changed, missing or new, or the digest is another one.
    """
    found = differences(directory)
    digest = _sha256(directory / SUMS)
    if expected is not None and expected.removeprefix("sha256:") != digest:
        raise BundleError(
            f"--bundle {directory}: its digest is sha256:{digest}, not {expected}. Fix: give the digest that"
            " `shoal bundle` printed when it made this bundle, or copy the bundle again from where it was made"
        )
    if found:
        told = [f"  {name}: {what}" for name, what in list(found.items())[:_TOLD]]
        told += [f"  and {len(found) - _TOLD} more"] * (len(found) > _TOLD)
        raise BundleError(
            "\n".join([f"--bundle {directory}: {len(found)} files are not as {SUMS} says:", *told])
            + "\nFix: copy the bundle again from where it was made, or make it again where there is a network"
        )
    return digest


def differences(directory: Path) -> dict[str, Literal["changed", "missing", "not listed"]]:
    """Return the files that are not as `SHA256SUMS` says, by path. Raises UsageError for no bundle."""
    listed = _read_sums(directory)
    there = dict(_files(directory))
    found: dict[str, Literal["changed", "missing", "not listed"]] = {}
    for name in sorted({*listed, *there}):
        if name not in listed:
            found[name] = "not listed"
        elif name not in there:
            found[name] = "missing"
        elif _sha256(there[name]) != listed[name]:
            found[name] = "changed"
    return found


def _read_sums(directory: Path) -> dict[str, str]:
    try:
        lines = (directory / SUMS).read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        raise _no_bundle(directory) from None
    matches = [_SUM.fullmatch(line) for line in lines]
    if not all(matches):
        raise BundleError(f"{directory / SUMS}: not what `sha256sum` writes. Fix: copy the bundle again")
    return {match[2]: match[1] for match in matches if match}


def _files(directory: Path) -> Iterator[tuple[str, Path]]:
    """Yield the files of a bundle by their paths within it, but for `SHA256SUMS`; and what is neither one nor a
    directory: a link to a directory would bring files that nobody has listed.
    """
    for path in directory.rglob("*"):
        is_directory = path.is_dir() and not path.is_symlink()
        if not is_directory and (name := path.relative_to(directory).as_posix()) != SUMS:
            yield name, path


def _sha256(path: Path) -> str:
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _no_bundle(directory: Path) -> UsageError:
    return UsageError(
        f"--bundle {directory}: not a bundle, or one without {SUMS}. Make it where there is a network: shoal bundle"
        f" {directory}"
    )


def read(directory: Path) -> NetworkSettings:
    """Return what a build is given in place of this machine's configuration, of a bundle that `check` has passed.

    apt is told to trust the bundle's packages: their index has been checked, and apt checks them against it. Raises
    UsageError for no bundle.
    """
    suites = [path.parent for path in directory.glob(f"*/{BASE}") if (path.parent / DEBS / INDEX).is_file()]
    if not suites:
        raise _no_bundle(directory)
    return NetworkSettings(
        pip=(("no-index", "true"),),
        find_links=(directory / WHEELS,),
        apt_sources=(),
        apt_proxies=(),
        ca_bundle=None,
        proxies=(),
        left_out=(),
        debs={suite.name: tuple(sorted((suite / DEBS).glob("*"))) for suite in suites},
    )


def load_bases(client: docker.DockerClient, directory: Path, systems: Iterable[System]) -> None:
    """Give the engine the bundle's base images of these systems, where it has none. `check` has passed the bundle.

    Raises UsageError for no bundle, and for one that lacks a system; BundleError for a base that would take the place
    of another image.
    """
    suites = read(directory).debs
    for system in systems:
        if system.suite not in suites:
            raise UsageError(
                f"--bundle {directory}: it is for Debian {', '.join(sorted(suites))}, not for {system.suite}."
                f" Add the images where there is a network: shoal bundle {directory}"
            )
        if base.find(client, system) is None:
            path = directory / system.suite / BASE
            with TemporaryFile() as out:
                names = rewrite_image(path, out)
                if strange := [name for name in names if not base.is_name_of(name, system)]:
                    raise BundleError(
                        f"{path}: it would name images {', '.join(sorted(strange))}, and may hold the base of Debian"
                        f" {system.suite} alone. Fix: copy the bundle again from where it was made"
                    )
                client.images.load(out)


def rewrite_image(path: Path, out: IO[bytes]) -> set[str]:
    """Write an archive of images anew, and rewind it. Returns each name that an engine may give an image of it.

    An engine reads the names from one of three files, depending on its age and image store. It reads archives in ways
    of its own (compressed ones, names such as `/manifest.json`, files under links): so it is given nothing but the
    files that were found here. Raises BundleError for no archive of images.
    """
    try:
        with TemporaryDirectory() as scratch, path.open("rb") as source:
            root = Path(scratch)
            if left_out := list(archive.unpack(source, root)):
                raise ValueError(left_out[0])
            files = {file.relative_to(root).as_posix(): file for file in root.rglob("*") if file.is_file()}
            documents = {name: json.loads(files[name].read_bytes()) for name in _DOCUMENTS if name in files}
            archive.write(files, out)
            out.seek(0)
        return {name.removeprefix(_REGISTRY) for name in _names(documents)}
    except (*_NO_FILES, tarfile.TarError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BundleError(f"{path}: not an archive of images: {error}. Fix: copy the bundle again") from error


def _names(documents: dict[str, Any]) -> Iterator[str]:
    for image in documents.get("manifest.json", ()):
        yield from image["RepoTags"] or ()
    for repository, tags in documents.get("repositories", {}).items():
        yield from (f"{repository}:{tag}" for tag in tags)
    for image in documents.get("index.json", {}).get("manifests", ()):
        full, short = (image.get("annotations", {}).get(name) for name in _IMAGE_NAMES)
        if found := full or short:
            yield found
