"""What builds take from a network, in one directory: the locked wheels, `shoal` itself, and of each suite of Debian, in
a directory of its name, the base image and packages.

`shoal bundle` fills it where there is a network, and `shoal build --bundle` builds from it, with the network off.
"""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile

import docker
from docker.models.containers import Container

from shoal import docker_client
from shoal.builds import base, bundled, debianlock, hostwheels
from shoal.builds.base import Say
from shoal.builds.bundled import BASE, DEBS, INDEX, SUMS, WHEELS
from shoal.docker_client import archive
from shoal.errors import BuildError, BundleError, DiskError, UsageError, is_disk_full
from shoal.matrix.project import Project
from shoal.matrix.spec import BuildSpec, ImageSpec
from shoal.network.settings import read_network_settings
from shoal.sources import debian, lock, pins, wheels

_HOST = "host"
# Run in the base image: what is asked for and all that it needs there, with an index that apt reads.
_FETCH = """
mkdir -p /debs/partial &&
apt-get install -y -qq --no-install-recommends --download-only -o Dir::Cache::archives=/debs {names} &&
cd /debs && rm -rf partial lock && for file in *.deb; do
    dpkg-deb --field "$file" && echo "Filename: ./$file" && echo "Size: $(stat -c %s "$file")" &&
    echo "SHA256: $(sha256sum "$file" | cut -d' ' -f1)" && echo
done > {index}
"""


_WHEN_FULL = "What to do: free some, or name a directory on another disk; what is whole there is not fetched again"


@dataclass(frozen=True)
class Bundle:
    """What a directory has been filled with: the bases' references, Debian's packages less those that they need, and
    the images whose wheels are there. `bytes`: of all files in it. `digest`: that of `SHA256SUMS`, which lists them.
    """

    directory: Path
    bases: tuple[str, ...]
    packages: tuple[str, ...]
    images: tuple[str, ...]
    bytes: int
    digest: str


def collect(project: Project, spec: BuildSpec, images: Iterable[ImageSpec], directory: Path, say: Say) -> Bundle:
    """Fill the directory with what builds of these images, and of those that they extend, take from a network.

    What lies there already stays, and nothing that is cut off: each file comes to its place when it is whole. Raises
    BuildError with apt's or pip's words, DiskError, UsageError for what is no directory, BundleError for a bundle whose
    files have changed since it was made, DockerError, BaseImageError.
    """
    wanted = spec.with_parents(images)
    _make(directory)
    _check_unchanged(directory)
    client = docker_client.connect()
    bases: list[str] = []
    packages: set[str] = set()
    for system in dict.fromkeys(image.system for image in wanted):
        pin = debian.read(project, system.suite).bases.get(system.upstream, "")
        found = base.ensure(client, system, read_network_settings, project.cache, say, pin=pin)
        own = directory / system.suite
        (own / DEBS).mkdir(parents=True, exist_ok=True)
        say(f"base: {found.reference}")
        _save(client, found.reference, own / BASE)
        installs = debianlock.installed(project, (image for image in wanted if image.system == system))
        names = sorted({name for install in installs for name in install})
        say(f"Debian packages: {' '.join(names)}, and what they need")
        _collect_debs(client, found.reference, system.suite, names, own)
        bases.append(found.reference)
        packages.update(names)
    for image in wanted:
        say(f"wheels: {image.tag}")
        _collect_wheels(project, spec, image, directory / WHEELS)
    install = hostwheels.COMMAND.format(directory=directory / _HOST)
    say(f"shoal itself, for Python {sys.version_info.major}.{sys.version_info.minor}; there: {install}")
    with _scratch(directory) as scratch:
        if words := hostwheels.collect(project, scratch):
            raise _failure(f"pip cannot fetch what shoal itself needs:\n{words[-2000:]}")
        _move(scratch / "wheels", directory / _HOST)
    digest = bundled.write_sums(directory)
    size = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
    return Bundle(directory, tuple(bases), tuple(sorted(packages)), tuple(image.tag for image in wanted), size, digest)


def _make(directory: Path) -> None:
    if directory.exists() and not directory.is_dir():
        raise UsageError(f"{directory}: is a file; expected a directory, new or of a bundle. Name another")
    for name in (WHEELS, _HOST):
        (directory / name).mkdir(parents=True, exist_ok=True)


def _check_unchanged(directory: Path) -> None:
    """Raise BundleError if a file of an earlier bundle has been changed: it would be listed as one that was made here.

    Files may be missing, and new ones be there, as an interrupted `shoal bundle` leaves them.
    """
    if not (directory / SUMS).exists():
        return
    if changed := [name for name, what in bundled.differences(directory).items() if what == "changed"]:
        raise BundleError(
            f"{directory}: changed since it was made: {', '.join(changed[:10])}. Fix: remove these files; what is"
            " missing is fetched again"
        )


@contextmanager
def _scratch(directory: Path) -> Iterator[Path]:
    """Give a directory on the bundle's own disk, which is gone in the end: what is whole can be moved out of it."""
    try:
        with TemporaryDirectory(dir=directory, prefix=".shoal-") as name:
            yield Path(name)
    except OSError as error:
        if is_disk_full(error):
            raise DiskError(f"{directory}: {error.strerror}. {_WHEN_FULL}") from error
        raise


def _failure(text: str) -> BuildError | DiskError:
    """Return what another program's failure is, by its words."""
    return DiskError(f"{text}\n{_WHEN_FULL}") if os.strerror(errno.ENOSPC) in text else BuildError(text)


def _save(client: docker.DockerClient, reference: str, path: Path) -> None:
    with _scratch(path.parent) as scratch:
        with (scratch / path.name).open("wb") as file:
            for chunk in client.images.get(reference).save(named=True):
                file.write(chunk)
        (scratch / path.name).replace(path)


def _collect_debs(
    client: docker.DockerClient, reference: str, suite: str, names: Iterable[str], directory: Path
) -> None:
    script = _FETCH.format(names=" ".join(names), index=INDEX)
    try:
        with (
            debianlock.in_base(client, reference, suite, script, f"fetch {' '.join(names)}") as container,
            _scratch(directory) as scratch,
        ):
            _fetch(container, f"/{DEBS}", scratch)
            _index_others(scratch / DEBS, directory / DEBS)
            _move(scratch / DEBS, directory / DEBS, last=INDEX)
    except BuildError as error:
        raise _failure(str(error)) from error


def _index_others(new: Path, old: Path) -> None:
    """Add to the index of new packages those that lie there already and are not among them."""
    index = old / INDEX
    entries = index.read_text().split("\n\n") if index.is_file() else []
    with (new / INDEX).open("a") as file:
        for entry in entries:
            name = "".join(re.findall(r"^Filename: \./(.+)$", entry, re.MULTILINE))
            if name and not (new / name).exists() and (old / name).exists():
                file.write(f"{entry.strip()}\n\n")


def _fetch(container: Container, path: str, directory: Path) -> None:
    chunks, _ = container.get_archive(path)
    with TemporaryFile(dir=directory) as file:
        for chunk in chunks:
            file.write(chunk)
        file.seek(0)
        if left_out := list(archive.unpack(file, directory)):
            raise BuildError(f"{path} of a container: {'; '.join(left_out)}")


def _move(source: Path, target: Path, last: str = "") -> None:
    """Move the files there; `last` says that the others are."""
    for path in sorted(source.iterdir(), key=lambda path: path.name == last):
        path.replace(target / path.name)


def _collect_wheels(project: Project, spec: BuildSpec, image: ImageSpec, directory: Path) -> None:
    wanted = [pin for layer in pins.read_image(project, spec, image).values() for pin in layer]
    there = {pin for pin, _ in wheels.find_locked(wanted, [directory])}
    if not (lacking := [pin for pin in wanted if pin not in there]):
        return
    with _scratch(directory.parent) as scratch:
        for name in ("wheels", "temporary"):
            (scratch / name).mkdir()
        # `===`: a file for the CPU that pip may have at hand is of the same version, and another one.
        lines = [f"{pin.name}==={pin.version} --hash=sha256:{pin.sha256}\n" for pin in lacking]
        (scratch / "requirements.txt").write_text("".join(lines))
        result = _pip_download(spec, image, scratch)
        if result.returncode:
            raise _failure(f"{image.tag}: pip cannot fetch its wheels:\n{result.stderr.strip()[-2000:]}")
        _move(scratch / "wheels", directory)


def _pip_download(spec: BuildSpec, image: ImageSpec, scratch: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
    command += [*lock.target_options(image.python_version), f"--dest={scratch / 'wheels'}"]
    command.append(f"--requirement={scratch / 'requirements.txt'}")
    # An interrupt kills it, with no time to remove what it has begun.
    environment = {**os.environ, "TMPDIR": str(scratch / "temporary")}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if result.returncode and image.index:  # only where pip's own configuration does not hold the file
        command += ["--extra-index-url", spec.indexes[image.index]]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return result
