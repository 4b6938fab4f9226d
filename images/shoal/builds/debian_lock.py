"""Locks the base images and Debian packages that builds get now (`shoal lock --bases`).

It also tells builds how their base and packages differ from the lock, and runs scripts in containers of base images.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import docker
from docker.models.containers import Container

from shoal import docker_client
from shoal.builds import base_image
from shoal.builds.base_image import BaseImage, Say
from shoal.docker_client import archive, containers
from shoal.errors import BuildError
from shoal.matrix.project import Project
from shoal.matrix.spec import BuildSpec, ImageSpec, System
from shoal.network.settings import NetworkSettings, read_network_settings, read_settings_for
from shoal.sources import debian, render
from shoal.sources.debian import DebianLock

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
        names = {image.framework if image.extends else "" for image in of_system}
        found = base_image.provide_base(client, system, read_network_settings, project.cache, say, newest="" in names)
        settings = read_settings_for(project, say)
        locked = debian.read_lock(project, system.suite)
        if "" in names:
            wanted = [image for image in spec.images if image.system == system and not image.extends]
            packages = _list_packages(client, found, system, list_installed(project, wanted), settings)
            locked = DebianLock({**locked.bases, **_identity(client, found, system)}, packages)
            yield _write_lock(project, system.suite, "", locked, write=write)
        children = [image for image in spec.images if image.system == system and image.extends]
        for child in dict.fromkeys(image.framework for image in children if names & {"", image.framework}):
            installed = list_installed(project, (image for image in children if image.framework == child))
            packages = _list_packages(client, found, system, installed, settings) if installed else {}
            more = {name: digest for name, digest in packages.items() if name not in locked.packages}
            if more or debian.lock_path(project, system.suite, child).exists():
                yield _write_lock(project, system.suite, child, DebianLock({}, more), write=write)


def _write_lock(project: Project, suite: str, child: str, lock: DebianLock, *, write: bool) -> LockResult:
    path = debian.lock_path(project, suite, child)
    changes = tuple(debian.describe_changes(debian.read_lock(project, suite, child), lock))
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
    path = debian.lock_path(project, image.system.suite, image.framework if image.extends else "")
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
