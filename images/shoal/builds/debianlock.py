"""`shoal lock --bases`: what builds would get now from a registry and Debian's mirror, and how it differs."""

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
from shoal.builds import base
from shoal.builds.base import BaseImage, Say
from shoal.docker_client import archive, containers
from shoal.errors import BuildError
from shoal.matrix.project import Project
from shoal.matrix.spec import BuildSpec, ImageSpec, System
from shoal.network.settings import read_network_settings
from shoal.sources import debian, render
from shoal.sources.debian import DebianLock

FIX = "Fix: .venv/bin/shoal lock --bases, then build again"
_PRINT = "apt-get install -qq --no-install-recommends --print-uris -o Acquire::ForceHash=SHA256 {names}"
_LISTED = re.compile(r"'\S+' (\S+\.deb) \d+ (SHA256:[0-9a-f]{64})")
_TOLD = 5


@dataclass(frozen=True)
class Locked:
    """The lock of a suite: its file, how many packages it has, and what changed. `written`: into the file."""

    suite: str
    path: Path
    packages: int
    changes: tuple[str, ...]
    written: bool


def installed(project: Project, images: Iterable[ImageSpec]) -> list[tuple[str, ...]]:
    """Return the Debian packages that the steps of these images ask apt for, each list once."""
    steps = (step for image in images for step in render.read_steps(project, image))
    return sorted({names for step in steps for names in step.packages})


def lock(project: Project, spec: BuildSpec, systems: Iterable[System], say: Say, *, write: bool) -> Iterator[Locked]:
    """Yield the lock of each system as its registry and mirror would have it now; `write` it where it changed.

    Raises BuildError with apt's words, DockerError, BaseImageError.
    """
    client = docker_client.connect()
    for system in systems:
        images = [image for image in spec.images if image.system == system]
        found = base.ensure(client, system, read_network_settings, project.cache, say, newest=True)
        before = debian.read(project, system.suite)
        packages = _packages(client, found, system, installed(project, images))
        after = DebianLock({**before.bases, **identity(client, found, system)}, packages)
        path, changes = debian.path(project, system.suite), tuple(debian.changes(before, after))
        if changes and write:
            path.parent.mkdir(exist_ok=True)
            path.write_text(after.text(system.suite))
        yield Locked(system.suite, path, len(packages), changes, bool(changes and write))


def identity(client: docker.DockerClient, found: BaseImage, system: System) -> dict[str, str]:
    """Return what tells a base image from others: its name, and the digest that a registry has of it, or of its layer.

    Empty for one that was neither pulled nor made here: an engine knows no digest of what it loads.
    """
    if found.digest:
        return {system.upstream: found.digest}
    if found.reference == system.upstream:
        return {}
    (layer,) = client.images.get(found.reference).attrs["RootFS"]["Layers"]
    return {f"{base.REPOSITORY}:{system.suite}": layer}


def differences(client: docker.DockerClient, found: BaseImage, system: System, locked: DebianLock) -> Iterator[str]:
    """Yield in words what of a build's start is not pinned, or is not the one of the lock."""
    file = f"dockerfiles/debian/{system.suite}.txt"
    if not locked.packages:
        yield f"Debian {system.suite}: no versions of packages in {file}. {FIX}"
    own = identity(client, found, system)
    if not own:
        yield f"base: {found.reference} was loaded, not pulled; nothing tells whether it is the one of {file}"
    for name, digest in own.items():
        if name not in locked.bases:
            yield f"base: {found.reference} has no pin in {file}. {FIX}"
        elif locked.bases[name] != digest:
            yield (
                f"base: {found.reference} is {digest[:19]}, and {file} has {locked.bases[name][:19]}. Fix: remove the"
                " image and what .cache/shoal has of it, or .venv/bin/shoal lock --bases"
            )


def drift(tag: str, system: System, files: Sequence[str]) -> str:
    """Return in words which Debian packages a build installed that the lock does not have."""
    more = f" and {len(files) - _TOLD} more" if len(files) > _TOLD else ""
    return (
        f"{tag}: {len(files)} of Debian's packages are not those of dockerfiles/debian/{system.suite}.txt:"
        f" {', '.join(files[:_TOLD])}{more}. {FIX}"
    )


@contextmanager
def in_base(client: docker.DockerClient, reference: str, suite: str, script: str, doing: str) -> Iterator[Container]:
    """Give a container of a base in which a script has run, with this machine's configuration in /run/machine.

    Raises BuildError with its last words where it failed at `doing`.
    """
    host = read_network_settings()
    files = io.BytesIO()
    archive.write({f"machine/{name}": content for name, content in host.build_files(suite).items()}, files)
    label = containers.unique("debian")
    settings = {"environment": dict(host.proxies), "labels": {containers.JOB_LABEL: label}}
    script = f"export APT_CONFIG=/run/machine/apt.conf DEBIAN_FRONTEND=noninteractive\napt-get update -qq\n{script}"
    with containers.removing(client, label):
        container = containers.create(client, reference, ["sh", "-ec", script], settings)
        container.put_archive("/run", files.getvalue())
        container.start()
        if container.wait()["StatusCode"]:
            log = container.logs().decode(errors="replace")
            raise BuildError(f"apt-get cannot {doing}:\n{log[-2000:]}")
        yield container


def _packages(
    client: docker.DockerClient, found: BaseImage, system: System, wanted: Iterable[tuple[str, ...]]
) -> dict[str, str]:
    script = "\n".join(_PRINT.format(names=" ".join(names)) for names in wanted)
    with in_base(client, found.reference, system.suite, script, f"list packages of Debian {system.suite}") as container:
        lines = container.logs(stderr=False).decode(errors="replace").splitlines()
    listed = [_LISTED.fullmatch(line.strip()) for line in lines if line.startswith("'")]
    if not listed or not all(listed):
        raise BuildError(
            f"Debian {system.suite}: apt-get names no packages with their SHA-256:\n" + "\n".join(lines[-5:])
        )
    return {match[1]: match[2] for match in listed if match}
