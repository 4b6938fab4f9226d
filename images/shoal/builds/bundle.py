"""Fills a bundle: a directory with all that builds download, so that `shoal build --bundle` needs no network.

It holds the locked wheels, `shoal` itself, and for each suite of Debian, in a directory of its name, the base image and
packages.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from tempfile import TemporaryDirectory

import docker
from docker.models.containers import Container

from shoal import docker_client
from shoal.builds import base_image, bundled, debian_lock
from shoal.builds.base_image import Say
from shoal.builds.bundled import BASE, DEBS, INDEX, SUMS, WHEELS
from shoal.docker_client import archive, containers
from shoal.errors import BuildError, BundleError, DiskError, UsageError, is_disk_full
from shoal.matrix.project import Project, find_shipped
from shoal.matrix.spec import BuildSpec, ImageSpec, System
from shoal.network.settings import NetworkSettings, pip_environment, read_network_settings, read_settings_for
from shoal.sources import lock, packages
from shoal.sources.packages import write_source_tree

INSTALL = "python3 -m venv .venv && .venv/bin/pip install --no-index --find-links {directory} shoal"
"""The command that installs `shoal` from a bundle, for users to type."""
_HOST = "host"
_OWN = re.compile(rf"({WHEELS}|{_HOST})/[^/]+\.whl|[^/]+/({DEBS}/[^/]+|{re.escape(BASE)})")
"""The paths of files in a bundle."""
# Runs in the base image: downloads packages and all that they need there, and writes an index that apt reads.
_FETCH = """
mkdir -p /debs/partial &&
apt-get install -y -qq --no-install-recommends --download-only -o Dir::Cache::archives=/debs {names} &&
cd /debs && rm -rf partial lock && for file in *.deb; do
    dpkg-deb --field "$file" && echo "Filename: ./$file" && echo "Size: $(stat -c %s "$file")" &&
    echo "SHA256: $(sha256sum "$file" | cut -d' ' -f1)" && echo
done > {index}
"""
AddLock = Callable[[Path], None]
_WHEN_FULL = "Fix: free some, or name a directory on another disk; whole files are not downloaded again"


@dataclass(frozen=True)
class Bundle:
    """The content of a bundle that has been filled."""

    directory: Path
    bases: tuple[str, ...]
    packages: tuple[str, ...]
    """Debian's packages, without those that they need."""
    images: tuple[str, ...]
    """The images that it has wheels for."""
    bytes: int
    digest: str
    """The digest of `SHA256SUMS`, which lists all other files."""


def fill_bundle(
    project: Project,
    spec: BuildSpec,
    images: Iterable[ImageSpec],
    directory: Path,
    say: Say,
    locks: Iterable[AddLock] = (),
) -> Bundle:
    """Downloads all that builds of these images, and of those that they extend, need, and `shoal` itself.

    Writes `SHA256SUMS` at the end. Docker gets the base images that it lacks. Existing files of a bundle stay. Each
    file is moved to its place when it is whole, so an interrupt leaves no part.

    Args:
        locks: Each puts the files of a lock file for a script into a directory `wheels` of the one that it is given.

    Raises:
        BuildError: With the words of apt or pip.
        BundleError: If files of the bundle have changed since it was made, or others are among them.
        UsageError: If `directory` is a file.
        DiskError, DockerError, BaseImageError: As their names say.
    """
    wanted = spec.with_parents(images)
    _make_directories(directory)
    unlisted = _check_unchanged(directory)
    client = docker_client.connect()
    bases: list[str] = []
    installed: set[str] = set()
    for system in dict.fromkeys(image.system for image in wanted):
        sets = debian_lock.list_installed(project, (image for image in wanted if image.system == system))
        names = sorted({name for names in sets for name in names})
        bases.append(_add_system(client, project, system, names, directory / system.suite, say))
        installed.update(names)
    for image in wanted:
        say(f"wheels: {image.tag}")
        locked = _add_wheels(project, spec, image, directory / WHEELS)
        unlisted = {name: inode for name, inode in unlisted.items() if name not in locked}
    for add in locks:
        with _scratch(directory) as scratch:
            add(scratch)
            _move(scratch / WHEELS, directory / WHEELS)
    install = INSTALL.format(directory=directory / _HOST)
    say(f"shoal itself, for Python {sys.version_info.major}.{sys.version_info.minor}; there: {install}")
    add_shoal(directory, directory / _HOST)
    _refuse(directory, [name for name, inode in unlisted.items() if (directory / name).lstat().st_ino == inode])
    digest = bundled.write_sums(directory)
    size = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
    return Bundle(directory, tuple(bases), tuple(sorted(installed)), tuple(image.tag for image in wanted), size, digest)


def _add_system(
    client: docker.DockerClient, project: Project, system: System, names: list[str], directory: Path, say: Say
) -> str:
    """Pulls or makes the base image if Docker lacks it. Returns its reference."""
    pin = debian_lock.read_lock(project, system.suite).bases.get(system.upstream, "")
    found = base_image.provide_base(client, system, read_network_settings, project.cache, say, pin=pin)
    (directory / DEBS).mkdir(parents=True, exist_ok=True)
    say(f"base: {found.reference}")
    _save_image(client, found.reference, directory / BASE)
    say(f"Debian packages: {' '.join(names)}, and their dependencies")
    _add_debs(client, found.reference, system.suite, names, directory, read_settings_for(project, say))
    return found.reference


def add_shoal(scratch_parent: Path, target: Path) -> None:
    """Adds the wheels of `shoal` and its dependencies, for hosts with this Python and processor but no network.

    The wheel of `shoal` has the image definitions that it comes with. Versions are pinned as in a checkout. Like
    `build_wheel`, it sets variables of this process, and changes its working directory meanwhile. Raises `BuildError`
    with pip's words, or `DiskError`.
    """
    target.mkdir(parents=True, exist_ok=True)
    shipped = find_shipped()
    pinned = shipped.root / "requirements" / "shoal.txt"
    constraint = [f"--constraint={pinned}"] if pinned.is_file() else []
    with _scratch(scratch_parent) as scratch:
        (scratch / "own").mkdir()
        write_source_tree(shipped, "images", scratch / "tree")
        own = packages.build_wheel(scratch / "tree", scratch / "own")
        result = _pip_download(scratch, ["--only-binary=:all:", *constraint, str(own)])
        if result.returncode:
            raise _failure(_describe_pip_failure("the dependencies of shoal", result.stderr))
        _move(scratch / "wheels", target)


def _make_directories(directory: Path) -> None:
    if directory.exists() and not directory.is_dir():
        raise UsageError(f"{directory}: is a file; expected a directory, new or of a bundle. Fix: name another")
    (directory / WHEELS).mkdir(parents=True, exist_ok=True)


def _check_unchanged(directory: Path) -> dict[str, int]:
    """Returns the inodes of files that `SHA256SUMS` does not list, by path. An interrupted `shoal bundle` leaves some.

    A file that somebody else has added looks the same, so each of them must be made again. Raises BundleError if a file
    of an earlier bundle has been changed, for it would be listed as made here. The same holds for links, and for
    files that no bundle has.
    """
    is_listed = os.path.lexists(directory / SUMS)
    found = dict(bundled.list_files(directory))
    differences = bundled.find_differences(directory) if is_listed else dict.fromkeys(found, "not listed")
    if changed := [name for name, what in differences.items() if what == "changed"]:
        raise BundleError(
            f"{directory}: changed since it was made: {', '.join(changed[:10])}. Fix: remove these files; missing"
            " files are downloaded again"
        )
    unlisted = {name: found[name].lstat() for name, what in differences.items() if what == "not listed"}
    _refuse(directory, [name for name, of in unlisted.items() if not (_OWN.fullmatch(name) and S_ISREG(of.st_mode))])
    return {name: status.st_ino for name, status in unlisted.items()}


def _refuse(directory: Path, names: list[str]) -> None:
    """Raises BundleError if there are files that were not made here: they would be listed as if they were."""
    if names:
        raise BundleError(
            f"{directory}: not made by this command: {', '.join(sorted(names)[:10])}. Fix: remove these files, or"
            " name a new directory"
        )


@contextmanager
def _scratch(directory: Path) -> Iterator[Path]:
    """Yields a temporary directory on the bundle's own disk, so that whole files can be moved out of it."""
    scratch: Path | None = None
    try:
        with TemporaryDirectory(dir=directory, prefix=".shoal-") as name:
            scratch = Path(name)
            yield scratch
    except KeyboardInterrupt:
        if scratch:  # it may have come while the directory was removed
            shutil.rmtree(scratch, ignore_errors=True)
        raise
    except OSError as error:
        if is_disk_full(error):
            raise DiskError(f"{directory}: {error.strerror}. {_WHEN_FULL}") from error
        raise


def _failure(text: str) -> BuildError | DiskError:
    return DiskError(f"{text}\n{_WHEN_FULL}") if os.strerror(errno.ENOSPC) in text else BuildError(text)


def _save_image(client: docker.DockerClient, reference: str, path: Path) -> None:
    """Saves an image as an archive, as `docker save` writes it. The file appears when it is whole."""
    with _scratch(path.parent) as scratch:
        with (scratch / path.name).open("wb") as file:
            for chunk in client.images.get(reference).save(named=True):
                file.write(chunk)
        (scratch / path.name).replace(path)


def _add_debs(
    client: docker.DockerClient,
    reference: str,
    suite: str,
    names: Iterable[str],
    directory: Path,
    host: NetworkSettings,
) -> None:
    """Adds the packages with an index, which also lists packages that the bundle has already."""
    script = _FETCH.format(names=" ".join(names), index=INDEX)
    try:
        with (
            debian_lock.run_in_base(client, reference, suite, script, f"fetch {' '.join(names)}", host) as container,
            _scratch(directory) as scratch,
        ):
            _fetch(container, f"/{DEBS}", scratch)
            _index_others(scratch / DEBS, directory / DEBS)
            _move(scratch / DEBS, directory / DEBS, last=INDEX)
    except BuildError as error:
        raise _failure(str(error)) from error


def _index_others(new: Path, old: Path) -> None:
    """Adds the existing packages that are not among the new ones to the index of these."""
    index = old / INDEX
    entries = index.read_text().split("\n\n") if index.is_file() else []
    with (new / INDEX).open("a") as file:
        for entry in entries:
            name = "".join(re.findall(r"^Filename: \./(.+)$", entry, re.MULTILINE))
            if name and not (new / name).exists() and (old / name).exists():
                file.write(f"{entry.strip()}\n\n")


def _fetch(container: Container, path: str, directory: Path) -> None:
    with containers.read_archive(container, path) as file:
        if left_out := list(archive.unpack_safely(file, directory)):
            raise BuildError(f"{path} of a container: {'; '.join(left_out)}. Fix: make the bundle again")


def _move(source: Path, target: Path, last: str = "") -> None:
    """Moves `last` last: it says that the others are there. Both directories must be on one file system."""
    for path in sorted(source.iterdir(), key=lambda path: path.name == last):
        path.replace(target / path.name)


def _add_wheels(project: Project, spec: BuildSpec, image: ImageSpec, directory: Path) -> set[str]:
    """Downloads the locked wheels of an image that the bundle does not have; returns the paths of those that it has.

    pip tries the configured indexes, then the image's own. Raises `BuildError` with pip's words, or `DiskError`.
    """
    wanted = [pin for layer in lock.read_image_pins(project, spec, image).values() for pin in layer]
    present = [*lock.find_locked_wheels(wanted, [directory])]
    names = {f"{WHEELS}/{path.name}" for _, path in present}
    if not (missing := [pin for pin in wanted if pin not in {pin for pin, _ in present}]):
        return names
    with _scratch(directory.parent) as scratch:
        # `===`: pip may have a file for the CPU at hand that has the same version.
        lines = [f"{pin.name}==={pin.version} --hash=sha256:{pin.sha256}\n" for pin in missing]
        (scratch / "requirements.txt").write_text("".join(lines))
        options = ["--no-deps", "--require-hashes", *lock.target_options(image.python_version)]
        options.append(f"--requirement={scratch / 'requirements.txt'}")
        result = _pip_download(scratch, options)
        if result.returncode and image.index:  # only if pip's own configuration does not have the file
            result = _pip_download(scratch, [*options, "--extra-index-url", spec.indexes[image.index]])
        if result.returncode:
            raise _failure(_describe_pip_failure(f"the wheels of {image.tag}", result.stderr))
        _move(scratch / "wheels", directory)
    return names


def _describe_pip_failure(what: str, words: str) -> str:
    return (
        f"pip cannot download {what}:\n{words.strip()[-2000:]}\n"
        "Fix: check the network and the indexes: shoal doctor, pip config list"
    )


def _pip_download(scratch: Path, options: list[str]) -> subprocess.CompletedProcess[str]:
    """Runs `pip download`; a failure raises nothing. `scratch` has temporary files: an interrupt stops pip at once."""
    for name in ("wheels", "temporary"):
        (scratch / name).mkdir(exist_ok=True)
    command = [*lock.pip_command(), "download", "--quiet", f"--dest={scratch / 'wheels'}", *options]
    environment = {**pip_environment(), "TMPDIR": str(scratch / "temporary")}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
