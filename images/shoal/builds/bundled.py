"""Checks a bundle, and loads its base images and settings for a build. bundle.py fills it.

A bundle travels, so it is checked before use: every file against its SHA-256 in `SHA256SUMS`. The digest of that file
is the digest of the bundle. It is compared with the one that `shoal bundle` printed, if the user gives it. `write_sums`
makes that file when a bundle is filled.
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

from shoal.builds import base_image
from shoal.docker_client import archive
from shoal.errors import BundleError, UsageError
from shoal.limits import MOST_DEPTH, MOST_LOCK, MOST_REPORT, read_file
from shoal.matrix.spec import System
from shoal.network.settings import NetworkSettings

WHEELS = "wheels"
BASE, DEBS, INDEX = "base.tar", "debs", "Packages"
"""In the directory of a suite: the base image, the packages, and among these the index that apt reads."""
SUMS = "SHA256SUMS"
"""The file with the SHA-256 of every other file, in the format of `sha256sum`."""
_SUM = re.compile(r"([0-9a-f]{64}) [ *](.+)")
_SHOWN = 10
_REGISTRY = "docker.io/library/"
_NO_FILES = (FileExistsError, IsADirectoryError, NotADirectoryError)  # one path is a file and a directory
_DOCUMENTS = ("manifest.json", "repositories", "index.json")
_IMAGE_NAMES = ("io.containerd.image.name", "org.opencontainers.image.ref.name")


def write_sums(directory: Path) -> str:
    """Writes `SHA256SUMS`, and returns its own SHA-256 (hexadecimal): the bundle's digest."""
    lines = [f"{_sha256(path)}  {name}\n" for name, path in sorted(list_files(directory))]
    (directory / SUMS).write_text("".join(lines))
    return _sha256(directory / SUMS)


def check_bundle(directory: Path, expected: str | None) -> str:
    """Checks every file of a bundle, and returns its digest.

    Args:
        expected: The digest that `shoal bundle` printed, with or without `sha256:`; None: unknown.

    Raises:
        UsageError: If the directory is not a bundle.
        BundleError: If a file is changed, missing or new, or the digest is another one.
    """
    digest = hashlib.sha256(_read_list(directory)).hexdigest()
    if expected is not None and expected.removeprefix("sha256:") != digest:
        raise BundleError(
            f"--bundle {directory}: its digest is sha256:{digest}, not {expected}. Fix: give the digest that"
            " `shoal bundle` printed when it made this bundle, or copy the bundle again from where it was made"
        )
    if found := find_differences(directory):
        lines = [f"  {name}: {what}" for name, what in list(found.items())[:_SHOWN]]
        lines += [f"  and {len(found) - _SHOWN} more"] * (len(found) > _SHOWN)
        raise BundleError(
            "\n".join([f"--bundle {directory}: {len(found)} files are not as {SUMS} says:", *lines])
            + "\nFix: copy the bundle again from where it was made, or make it again on a host with a network"
        )
    return digest


def find_differences(directory: Path) -> dict[str, Literal["changed", "missing", "not listed"]]:
    """Returns the files that differ from `SHA256SUMS`, by path.

    Raises UsageError if there is no such file, and BundleError if it is damaged.
    """
    listed = read_sums(directory)
    there = dict(list_files(directory))
    found: dict[str, Literal["changed", "missing", "not listed"]] = {}
    for name in sorted({*listed, *there}):
        if name not in listed:
            found[name] = "not listed"
        elif name not in there:
            found[name] = "missing"
        elif _sha256(there[name]) != listed[name]:
            found[name] = "changed"
    return found


def _read_list(directory: Path) -> bytes:
    try:
        return read_file(directory / SUMS, MOST_LOCK)
    except (OSError, ValueError):
        raise _not_a_bundle(directory) from None


def read_sums(directory: Path) -> dict[str, str]:
    """Returns the SHA-256 of each file by path, as `SHA256SUMS` lists them.

    Raises UsageError without it, BundleError if damaged.
    """
    lines = _read_list(directory).decode(errors="replace").split("\n")
    matches = [_SUM.fullmatch(line) for line in lines if line]
    if not all(matches):
        raise BundleError(f"{directory / SUMS}: not what `sha256sum` writes. Fix: copy the bundle again")
    return {match[2]: match[1] for match in matches if match}


def list_files(directory: Path) -> Iterator[tuple[str, Path]]:
    """Yields the files of a bundle except `SHA256SUMS`, with their paths in it.

    A link to a directory is yielded too: it would bring in files that the list does not contain. Raises BundleError if
    directories are nested deeply.
    """
    pending = [(directory, 0)]
    while pending:
        parent, depth = pending.pop()
        if depth > MOST_DEPTH:
            raise BundleError(f"{directory}: more than {MOST_DEPTH} directories in each other. Fix: copy it again")
        for path in parent.iterdir():
            if path.is_dir() and not path.is_symlink():
                pending.append((path, depth + 1))
            elif (name := path.relative_to(directory).as_posix()) != SUMS:
                yield name, path


def _sha256(path: Path) -> str:
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _not_a_bundle(directory: Path) -> UsageError:
    return UsageError(
        f"--bundle {directory}: not a bundle, or one without {SUMS}. Fix: on a host with a network: shoal bundle"
        f" {directory}"
    )


def read_settings(directory: Path) -> NetworkSettings:
    """Returns the settings for builds from a bundle that `check_bundle` has passed: no package index, mirror or proxy.

    apt trusts the packages of the bundle: their index has been checked, and apt checks them against it. Raises
    UsageError if it is not a bundle.
    """
    suites = [path.parent for path in directory.glob(f"*/{BASE}") if (path.parent / DEBS / INDEX).is_file()]
    if not suites:
        raise _not_a_bundle(directory)
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
    """Loads the bundle's base images of these systems, if Docker has none. `check_bundle` has passed the bundle.

    Raises UsageError if the bundle lacks a system, and BundleError if a base image would replace another image.
    """
    suites = read_settings(directory).debs
    for system in systems:
        if system.suite not in suites:
            raise UsageError(
                f"--bundle {directory}: it is for Debian {', '.join(sorted(suites))}, not for {system.suite}."
                f" Fix: add the images on a host with a network: shoal bundle {directory}"
            )
        if base_image.find_base(client, system) is None:
            path = directory / system.suite / BASE
            with TemporaryFile() as out:
                names = copy_image(path, out)
                if strange := [name for name in names if not base_image.is_base_name(name, system)]:
                    raise BundleError(
                        f"{path}: it would name images {', '.join(sorted(strange))}, and may hold the base of Debian"
                        f" {system.suite} alone. Fix: copy the bundle again from where it was made"
                    )
                client.images.load(out)


def copy_image(path: Path, out: IO[bytes]) -> set[str]:
    """Copies an archive of images to `out`, rewinds it, and returns each name that Docker may give an image of it.

    Docker reads the names from one of three files, depending on its version and image store. It accepts more than this
    does: compressed archives, names such as `/manifest.json`, files under links. So it gets only the files found here.
    Raises BundleError if it is not an archive of images.
    """
    try:
        with TemporaryDirectory() as scratch, path.open("rb") as source:
            root = Path(scratch)
            if left_out := list(archive.unpack_safely(source, root)):
                raise ValueError(left_out[0])
            files = {file.relative_to(root).as_posix(): file for file in root.rglob("*") if file.is_file()}
            documents = {name: _read_document(files[name]) for name in _DOCUMENTS if name in files}
            archive.write_tar(files, out)
            out.seek(0)
        return {name.removeprefix(_REGISTRY) for name in _names(documents)}
    except (*_NO_FILES, tarfile.TarError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BundleError(f"{path}: not an archive of images: {error}. Fix: copy the bundle again") from error


def _read_document(path: Path) -> Any:
    # Docker takes `repotags` for `RepoTags`, and the last of both.
    def fold(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        folded = {key.casefold(): value for key, value in pairs}
        if len(folded) < len(pairs):
            raise ValueError(f"{path.name} has a key twice")
        return folded

    return json.loads(read_file(path, MOST_REPORT), object_pairs_hook=fold)


def _names(documents: dict[str, Any]) -> Iterator[str]:
    """Yields the names of images in documents, which differ between versions of Docker. A name may come twice."""
    for image in documents.get("manifest.json", ()):
        yield from image["repotags"] or ()
    for repository, tags in documents.get("repositories", {}).items():
        yield from (f"{repository}:{tag}" for tag in tags)
    for image in documents.get("index.json", {}).get("manifests", ()):
        full, short = (image.get("annotations", {}).get(name) for name in _IMAGE_NAMES)
        if found := full or short:
            yield found
