"""Connects to Docker, and checks its BuildKit, its GPUs and the free space on its disk."""

from __future__ import annotations

import grp
import os
import pwd
import shutil
import stat
from pathlib import Path

import docker
import docker.errors
import requests
from packaging.version import Version

from shoal.errors import DiskError, DockerError

GIB = 1024**3
LEAST_API = "1.40"
"""The oldest API of `shoal run`: the first with GPUs (Docker 19.03)."""


def connect(timeout: int | None = 600) -> docker.DockerClient:
    """Returns a client for the Docker that the environment names. Each thread needs its own client.

    Args:
        timeout: The longest silence on a connection, in seconds; None: no limit.

    Raises:
        DockerError: If no Docker answers.
    """
    try:
        # The annotation of the SDK leaves out None, which it documents as "no limit".
        return docker.from_env(timeout=timeout)  # type: ignore[arg-type]
    except (docker.errors.DockerException, requests.RequestException) as error:
        where = os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"
        if denial := _describe_denial(Path(where.removeprefix("unix://"))):
            raise DockerError(denial) from error
        raise DockerError(
            f"No Docker Engine answers at {where}: {error}\n"
            "Fix: start one, or point DOCKER_HOST at one. As root on Debian or Ubuntu, `shoal doctor --fix` installs"
            " and starts it. Without Docker, you can run a job in this environment: shoal run --engine none, or in a"
            " checkout: make train ENGINE=none"
        ) from error


def _describe_denial(socket: Path) -> str:
    """Returns the error for a socket of Docker that this user may not use; empty if it is none."""
    try:
        status = socket.stat()
        if not stat.S_ISSOCK(status.st_mode) or os.access(socket, os.W_OK):
            return ""
        user = pwd.getpwuid(os.geteuid()).pw_name
        group = grp.getgrgid(status.st_gid)
    except PermissionError:
        return f"{socket}: permission denied on the way to it. Fix: as root, give your user access to its directory"
    except (OSError, KeyError):
        return ""
    problem = f"{socket}: permission denied: Docker is there, and your user {user} may not use it"
    without = "Without Docker: shoal run --engine none"
    if not status.st_gid or not status.st_mode & stat.S_IWGRP:
        return f"{problem}. Fix: use root, rootless Docker, or DOCKER_HOST with one of yours. {without}"
    if user in group.gr_mem:
        return f"{problem} yet: this session began before {user} was in the group {group.gr_name}. Fix: log in again"
    return (
        f"{problem}. Fix: as root: usermod -aG {group.gr_name} {user}, and log in again (in it, {user} can act as root"
        f" on this machine). {without}"
    )


def check_buildkit(client: docker.DockerClient) -> None:
    """Raises `DockerError` if BuildKit cannot build images: Docker lacks it, or DOCKER_BUILDKIT=0 forbids it.

    Docker has it since API 1.39. The `Builder-Version` of its ping does not show it: Docker 20.10 names BuildKit
    there only if it is the command line's default. Podman, which has the same API, names its own component.
    Why there is no other builder: docs/decisions/buildkit-over-http.md.
    """
    if os.environ.get("DOCKER_BUILDKIT") == "0":
        raise DockerError(
            "DOCKER_BUILDKIT=0 asks for Docker's classic builder, which Shoal does not use: it keeps the passwords of"
            " package indexes in untagged images. Fix: unset DOCKER_BUILDKIT"
        )
    version = client.version()
    names = {component["Name"] for component in version.get("Components", ())}
    if "Engine" not in names or Version(version["ApiVersion"]) < Version("1.39"):
        raise DockerError(
            f"Docker has no BuildKit: {', '.join(sorted(names)) or 'unknown'}, API {version['ApiVersion']}. Builds need"
            " Docker Engine 18.09 or later. Fix: point DOCKER_HOST at one"
        )


def has_gpus(client: docker.DockerClient) -> bool:
    """Returns whether Docker can give NVIDIA GPUs to a container: it has NVIDIA's runtime."""
    return "nvidia" in client.info().get("Runtimes", {})


def check_disk(client: docker.DockerClient, needed_gib: int) -> None:
    """Raises `DiskError` if Docker's disk has less than `needed_gib` GiB free. A remote Docker is not checked."""
    if root := find_data_root(client):
        check_free_space(root, needed_gib)


def find_data_root(client: docker.DockerClient) -> Path | None:
    """Returns the directory of Docker's data; None if Docker runs on another machine, or the directory is not here."""
    root = Path(client.info()["DockerRootDir"])
    is_local = client.api.base_url == "http+docker://localhost"  # a UNIX socket; http+docker://ssh is another machine's
    return root if is_local and root.is_dir() else None


def check_free_space(directory: Path, needed_gib: int) -> None:
    """Raises `DiskError` if the disk of `directory` has less than `needed_gib` GiB free."""
    free = shutil.disk_usage(directory).free
    if free < needed_gib * GIB:
        raise DiskError(
            f"{directory}: {free / GIB:.1f} GiB free, and this build needs {needed_gib} GiB"
            " (disk_gib in dockerfiles/versions.yml)."
            " Fix: docker system df shows what Docker holds; docker image prune, docker builder prune free it."
        )
