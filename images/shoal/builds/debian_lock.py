"""The lock of a Debian suite: digests of its base images, and of the packages that builds install on them.

`shoal lock --bases` locks the ones that builds get now. Builds report how their base and packages differ from the lock.
Its guarantees and their limits: docs/decisions/pins-of-debian.md.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import docker
from docker.models.containers import Container

from shoal import docker_client
from shoal.builds import base_image
from shoal.builds.base_image import BaseImage, Say
from shoal.docker_client import archive, containers
from shoal.errors import BuildError, SpecError
from shoal.limits import read_project_file
from shoal.matrix.project import Project
from shoal.matrix.spec import BuildSpec, ImageSpec, System
from shoal.network.settings import NetworkSettings, read_network_settings, read_settings_for
from shoal.sources import render

NOT_LOCKED = "shoal: not locked: "
"""The start of the line that a build step prints for each package that the lock does not have."""
_BASE = re.compile(r"base (\S+) (sha256:[0-9a-f]{64})")
_PACKAGE = re.compile(r"(\S+\.deb) (SHA256:[0-9a-f]{64})")
_HEAD = "# Made by `shoal lock --bases`: base images of Debian {suite}, and the packages that builds install on them."

_CHILD_HEAD = "# Made by `shoal lock --bases`: more packages of Debian {suite}, which builds of {child} install."


@dataclass(frozen=True)
class DebianLock:
    """Digests of base images by the constant part of their names, and of packages (`SHA256:…`) by file name."""

    bases: Mapping[str, str]
    packages: Mapping[str, str]

    def text(self, suite: str, child: str = "") -> str:
        """Returns the content of the lock file of a suite, or of a child in it, sorted."""
        bases = (f"base {name} {digest}" for name, digest in sorted(self.bases.items()))
        packages = (f"{name} {digest}" for name, digest in sorted(self.packages.items()))
        head = (_CHILD_HEAD if child else _HEAD).format(suite=suite, child=child)
        return "\n".join([head, *bases, *packages, ""])


def lock_path(project: Project, suite: str, child: str = "") -> Path:
    """Returns the path of the lock file of a suite, or of a child in it. The file may not exist."""
    return project.templates / "debian" / (f"{suite}-{child}.txt" if child else f"{suite}.txt")


def read_lock(project: Project, suite: str, child: str = "") -> DebianLock:
    """Returns the lock of a suite or a child in it; empty if there is none. Raises `SpecError` with file and line."""
    where = lock_path(project, suite, child)
    bases, packages = {}, {}
    for number, line in enumerate(read_project_file(where).splitlines() if where.exists() else (), 1):
        if match := _BASE.fullmatch(line):
            bases[match[1]] = match[2]
        elif match := _PACKAGE.fullmatch(line):
            packages[match[1]] = match[2]
        elif line and not line.startswith("#"):
            raise SpecError(
                f"{where}:{number}: expected 'base NAME sha256:…' or 'FILE.deb SHA256:…', found {line!r}. Fix: make it"
                " again: shoal lock --bases"
            )
    return DebianLock(bases, packages)


def comparison_files(project: Project, suite: str, children: Iterable[str] = ()) -> dict[str, bytes]:
    """Returns the files with which a build step compares the packages of apt with the lock: compare.sh and lock.txt.

    lock.txt is empty if no packages are locked.

    Args:
        project: The project.
        suite: The suite of the image.
        children: The child, and those that it extends, of which the locks count too. None for an image without parent.
    """
    locks = [read_lock(project, suite, child) for child in ("", *children)]
    packages = DebianLock({}, {name: digest for lock in locks for name, digest in lock.packages.items()})
    script = files("shoal.builds").joinpath("compare.sh").read_bytes()
    return {"compare.sh": script, "lock.txt": packages.text(suite).encode() if packages.packages else b""}


def describe_changes(before: DebianLock, after: DebianLock) -> list[str]:
    """Returns a line for each base image or package that is new, gone or changed between two locks."""
    old, new = ({**lock.bases, **lock.packages} for lock in (before, after))
    lines = [f"+ {name}" for name in sorted(new.keys() - old.keys())]
    lines += [f"- {name}" for name in sorted(old.keys() - new.keys())]
    return lines + [
        f"! {name}: {old[name]} → {new[name]}" for name in sorted(old.keys() & new.keys()) if old[name] != new[name]
    ]


FIX = "Fix: shoal lock --bases{names}, then build again"
_PRINT = "apt-get install -qq --no-install-recommends --print-uris -o Acquire::ForceHash=SHA256 {names}"
_LISTED = re.compile(r"'\S+' (\S+\.deb) \d+ (SHA256:[0-9a-f]{64})")
_SHOWN = 5


@dataclass(frozen=True)
class LockResult:
    """The new lock of a suite or a child: its file, its number of packages, and its changes.

    `written`: the file has it.
    """

    suite: str
    path: Path
    packages: int
    changes: tuple[str, ...]
    written: bool


def list_installed(project: Project, images: Iterable[ImageSpec]) -> list[tuple[str, ...]]:
    """Returns the sets of Debian packages that steps of these images install, each once. Reads the templates only."""
    steps = (step for image in images for step in render.read_steps(project, image))
    return sorted({names for step in steps for names in step.packages})


def lock_systems(
    project: Project, spec: BuildSpec, images: Iterable[ImageSpec], say: Say, *, write: bool
) -> Iterator[LockResult]:
    """Yields the current lock of each system of `images`, from its registry and mirror. If it changed, `write` it.

    A child has a lock of its own, with the packages that its system's lacks. If all images of a system are children,
    only their locks are made, so that the images that they extend stay as they are.

    Pulls the newest base image if that is possible, except for children alone, and runs apt in a container of the base
    image. The lock keeps the digests of other base images. Raises BuildError with apt's words, DockerError,
    BaseImageError.
    """
    client = docker_client.connect()
    chosen: dict[System, list[ImageSpec]] = {}
    for image in images:
        chosen.setdefault(image.system, []).append(image)
    for system, of_system in chosen.items():
        names = {image.recipe if image.extends else "" for image in of_system}
        found = base_image.provide_base(client, system, read_network_settings, project.cache, say, newest="" in names)
        settings = read_settings_for(project, say)
        locked = read_lock(project, system.suite)
        if "" in names:
            wanted = [image for image in spec.images if image.system == system and not image.extends]
            packages = _list_packages(client, found, system, list_installed(project, wanted), settings)
            locked = DebianLock({**locked.bases, **_identity(client, found, system)}, packages)
            yield _write_lock(project, system.suite, "", locked, write=write)
        children = [image for image in spec.images if image.system == system and image.extends]
        for child in dict.fromkeys(image.recipe for image in children if names & {"", image.recipe}):
            installed = list_installed(project, (image for image in children if image.recipe == child))
            packages = _list_packages(client, found, system, installed, settings) if installed else {}
            more = {name: digest for name, digest in packages.items() if name not in locked.packages}
            if more or lock_path(project, system.suite, child).exists():
                yield _write_lock(project, system.suite, child, DebianLock({}, more), write=write)


def _write_lock(project: Project, suite: str, child: str, lock: DebianLock, *, write: bool) -> LockResult:
    path = lock_path(project, suite, child)
    changes = tuple(describe_changes(read_lock(project, suite, child), lock))
    if write and child and not lock.packages:
        path.unlink()
    elif write and changes:
        path.parent.mkdir(exist_ok=True)
        path.write_text(lock.text(suite, child))
    return LockResult(suite, path, len(lock.packages), changes, bool(changes and write))


def _identity(client: docker.DockerClient, found: BaseImage, system: System) -> dict[str, str]:
    if found.digest:
        return {system.upstream: found.digest}
    # An image that was loaded: Docker has no digest of its manifest.
    if found.reference == system.upstream:
        return {}
    (layer,) = client.images.get(found.reference).attrs["RootFS"]["Layers"]
    return {f"{base_image.REPOSITORY}:{system.suite}": layer}


def describe_differences(
    client: docker.DockerClient, found: BaseImage, system: System, locked: DebianLock
) -> Iterator[str]:
    """Yields a message for each part of a base image or its lock that is not pinned or differs.

    An image that was loaded, not pulled, cannot be compared: it gets a message too.
    """
    file = f"dockerfiles/debian/{system.suite}.txt"
    if not locked.packages:
        yield f"Debian {system.suite}: no package versions in {file}. {FIX.format(names='')}"
    own = _identity(client, found, system)
    if not own:
        yield f"base: {found.reference} was loaded, not pulled; it cannot be compared with {file}"
    for name, digest in own.items():
        if name not in locked.bases:
            yield f"base: {found.reference} has no pin in {file}. {FIX.format(names='')}"
        elif locked.bases[name] != digest:
            yield (
                f"base: {found.reference} is {digest[:19]}, and {file} has {locked.bases[name][:19]}. Fix: remove the"
                " image and its files in .cache/shoal, or shoal lock --bases"
            )


def describe_drift(project: Project, image: ImageSpec, files: Sequence[str]) -> str:
    """Returns a message that names Debian packages which a build installed and the lock lacks.

    It names at most `_SHOWN` of them, and then their remaining number. The fix for a child changes no other image.
    """
    path = lock_path(project, image.system.suite, image.recipe if image.extends else "")
    names = f" {image.tag}" if image.extends else ""
    more = f" and {len(files) - _SHOWN} more" if len(files) > _SHOWN else ""
    return (
        f"{image.tag}: {len(files)} of Debian's packages are not those of dockerfiles/debian/{path.name}:"
        f" {', '.join(files[:_SHOWN])}{more}. {FIX.format(names=names)}"
    )


@contextmanager
def run_in_base(
    client: docker.DockerClient, reference: str, suite: str, script: str, doing: str, host: NetworkSettings
) -> Iterator[Container]:
    """Runs a script in a container of a base image and yields the container, which has ended and is removed afterwards.

    `apt-get update` runs before the script. /run/machine has the settings `host`. Raises BuildError with the end of
    its log if it cannot do what `doing` says.
    """
    files = io.BytesIO()
    archive.write_tar({f"machine/{name}": content for name, content in host.build_files(suite).items()}, files)
    label = containers.unique_name("debian")
    settings = {"environment": dict(host.proxies), "labels": {containers.JOB_LABEL: label}}
    script = f"export APT_CONFIG=/run/machine/apt.conf DEBIAN_FRONTEND=noninteractive\napt-get update -qq\n{script}"
    with containers.remove_at_end(client, label):
        container = containers.create_container(client, reference, ["sh", "-ec", script], settings)
        container.put_archive("/run", files.getvalue())
        container.start()
        if container.wait()["StatusCode"]:
            log = container.logs().decode(errors="replace")
            raise BuildError(f"apt-get cannot {doing}:\n{log[-2000:].rstrip()}\nFix: check the mirror: shoal doctor")
        yield container


def _list_packages(
    client: docker.DockerClient,
    found: BaseImage,
    system: System,
    wanted: Iterable[tuple[str, ...]],
    host: NetworkSettings,
) -> dict[str, str]:
    """Returns the digests of the packages that apt would install now, by file name. Raises BuildError."""
    script = "\n".join(_PRINT.format(names=" ".join(names)) for names in wanted)
    with run_in_base(
        client, found.reference, system.suite, script, f"list packages of Debian {system.suite}", host
    ) as container:
        lines = container.logs(stderr=False).decode(errors="replace").splitlines()
    listed = [_LISTED.fullmatch(line.strip()) for line in lines if line.startswith("'")]
    if not listed or not all(listed):
        raise BuildError(
            f"Debian {system.suite}: apt-get names no packages with their SHA-256:\n"
            + "\n".join([*lines[-5:], "Fix: use a mirror whose index has them (/etc/apt/sources.list)"])
        )
    return {match[1]: match[2] for match in listed if match}
