"""Installs the lock file of a job into a copy of its image, once. Later jobs with the same lock start at once.

A container of the image, in which no file of the job but the lock runs, installs it, and is committed. The image is
found again by its ID, in this user's own list (docs/decisions/lock-files.md).
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import docker
import docker.errors
import docker.types
from docker.models.containers import Container

from shoal import trust
from shoal.docker_client import archive, containers
from shoal.docker_client.images import find_image, read_config
from shoal.errors import ImageError, UsageError
from shoal.jobs.job import JobRequest
from shoal.jobs.running import state_directory
from shoal.limits import MOST_LOCK, MOST_RECORD, read_file
from shoal.network.settings import NetworkSettings, read_network_settings

REPOSITORY = "shoal-lock"
"""The repository of the images, for people: nothing is found by it."""
_GROUPS = "SHOAL_DEPENDENCY_GROUPS"
_LOCKS = ("uv.lock", "pylock.toml")
_MACHINE = "/run/machine"
_OTHER_INDEX = "CA_REPOSITORY_ARN"
_SHOWN = 25


def read_lock(source: Path) -> dict[str, bytes]:
    """Returns the files that decide which packages `train` installs, the lock file first; none without a lock file.

    `train` has the same rules: a requirements.txt comes first, and is a lock file if it has hashes.
    """
    requirements = _read(source / "requirements.txt")
    if requirements.strip():
        includes = any(line.startswith((b"-r", b"-c", b"--req", b"--cons")) for line in requirements.splitlines())
        return {"requirements.txt": requirements} if b"--hash=" in requirements and not includes else {}
    name = next((name for name in _LOCKS if (source / name).is_file()), "")
    names = (name, "pyproject.toml") if name == "uv.lock" else (name,)
    return {each: content for each in names if each and (content := _read(source / each))}


def _read(path: Path) -> bytes:
    try:
        return read_file(path, MOST_LOCK)
    except (OSError, ValueError):
        return b""


def provide_image(client: docker.DockerClient, request: JobRequest, identity: str, say: Callable[[str], object]) -> str:
    """Returns the ID of an image that has the packages of the job's lock file; empty if it has no lock file.

    The first time it makes the image, with this machine's network settings, and says so. An image of the same source
    and tag with an earlier lock is removed.

    Args:
        request: The job. Its variables for pip and uv apply to the installation too.
        identity: The label of the container that installs.
        say: Prints a line.

    Raises:
        ImageError: If the lock file cannot be installed.
    """
    files = read_lock(request.source) if request.source and _OTHER_INDEX not in request.environment else {}
    base = find_image(client, request.image) if files else None
    if base is None:
        return ""
    groups = request.environment.get(_GROUPS, "")
    key = _compute_key(str(base.id), groups, files)
    known = _List()
    if (found := known.find(key)) and find_image(client, found):
        return found
    name = next(iter(files))
    volumes = [mount for volume in request.volumes for mount in replace(volume, read_only=True).to_mounts()]
    with _run_container(client, request.image, identity, volumes) as container:
        if container.exec_run(["python", "-c", "import shoal_toolkit.sidecars.locked"]).exit_code:
            return ""  # an image without our `train`, or with an older one
        say(f"installing {name} into a copy of {request.image}, for this job and later ones")
        settings = read_network_settings().without_logins()  # the image, and packages that are built here, run code
        container.put_archive("/", _pack(settings, files))
        environment = {"PIP_CONFIG_FILE": f"{_MACHINE}/pip.conf", **dict(settings.proxies), **_select(request)}
        _install(container, name, (), environment, f"{name}: cannot be installed into {request.image}", say)
        config = read_config(base)
        labels = {**(config.get("Labels") or {}), containers.JOB_LABEL: ""}  # not this job's
        image = container.commit(REPOSITORY, key[:16], conf={**config, "Labels": labels})
    known.add(key, str(image.id), f"{Path(request.source or '').resolve()} {request.image}", client)
    return str(image.id)


def download_lock(
    client: docker.DockerClient, image: str, source: Path, target: Path, say: Callable[[str], object]
) -> None:
    """Downloads the files that a lock file adds to an image, and uv, into a directory, as the image's platform needs.

    Raises:
        UsageError: If the source has no lock file.
        ImageError: If Docker does not have the image, or a file cannot be downloaded.
    """
    files = read_lock(source)
    if not files:
        raise UsageError(
            f"--lock {source}: no uv.lock, pylock.toml or requirements.txt with hashes there. Fix: lock its"
            " packages, such as with uv lock"
        )
    name, identity = next(iter(files)), containers.unique_name("lock")
    settings = read_network_settings().without_logins()
    with _run_container(client, image, identity) as container:
        container.put_archive("/", _pack(settings, files))
        environment = {"PIP_CONFIG_FILE": f"{_MACHINE}/pip.conf", **dict(settings.proxies)}
        options = ("--download", f"{_MACHINE}/wheels")
        _install(container, name, options, environment, f"{name}: cannot be downloaded for {image}", say)
        with containers.read_archive(container, f"{_MACHINE}/wheels") as file:
            for omission in archive.unpack_safely(file, target):
                raise ImageError(f"{name}: not downloaded: {omission}. Fix: repeat the command")


def _compute_key(base: str, groups: str, files: Mapping[str, bytes]) -> str:
    parts = [base, groups, *(f"{name} {hashlib.sha256(content).hexdigest()}" for name, content in files.items())]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _select(request: JobRequest) -> dict[str, str]:
    """Returns the variables of a job that are about the installation. No image gets them."""
    return {k: v for k, v in request.environment.items() if k == _GROUPS or k.startswith(("PIP_", "UV_"))}


def _pack(settings: NetworkSettings, files: Mapping[str, bytes]) -> bytes:
    machine = {name: text for name, text in settings.build_files("").items() if name in ("pip.conf", "ca.crt")}
    contents = {**machine, **{f"code/{name}": content for name, content in files.items()}}
    with io.BytesIO() as out:
        archive.write_tar({f"{_MACHINE[1:]}/{name}": content for name, content in contents.items()}, out)
        return out.getvalue()


@contextlib.contextmanager
def _run_container(
    client: docker.DockerClient, image: str, identity: str, mounts: Sequence[docker.types.Mount] = ()
) -> Iterator[Container]:
    """Runs a container of an image that does nothing, and removes it at the end, with its volume at `_MACHINE`.

    A commit does not contain volumes. Nor has the container variables, which it would contain.
    """
    has_entry = bool(read_config(client.images.get(image)).get("Entrypoint"))
    settings = {
        "labels": {containers.JOB_LABEL: identity},
        "mounts": [*mounts, docker.types.Mount(_MACHINE, None, type="volume")],
        "init": True,
        **({"entrypoint": ["sleep"]} if has_entry else {}),
    }
    command = ["infinity"] if has_entry else ["sleep", "infinity"]
    container = containers.create_container(client, image, command, settings)
    try:
        container.start()
        yield container
    finally:
        with containers.delay_interrupts():
            container.remove(force=True, v=True)


def _install(
    container: Container,
    name: str,
    options: Sequence[str],
    environment: Mapping[str, str],
    problem: str,
    say: Callable[[str], object],
) -> None:
    """Runs the installation of `train` in a container, and prints its lines. Raises `ImageError` if it fails."""
    words = ["--locked", name]
    command = ["python", "-m", "shoal_toolkit.sidecars.install", *words, *options]
    workdir = f"{_MACHINE}/code"
    assert container.client is not None  # the SDK sets it
    api = container.client.api
    process = api.exec_create(container.id, command, environment=dict(environment), workdir=workdir, user="0")
    lines: list[str] = []
    with containers.close_at_end(api.exec_start(process["Id"], stream=True)) as stream:
        for line in containers.split_lines(stream):
            lines.append(str(line))
            say(f"install | {line}")
    if api.exec_inspect(process["Id"])["ExitCode"]:
        raise ImageError(f"{problem}. The end of its output:\n" + "\n".join(lines[-_SHOWN:]))


class _List:
    """This user's images with locks, a file for each: lock and image → ID.

    A list that others can change is not read.
    """

    def __init__(self) -> None:
        self.directory = state_directory() / "locks" / socket.gethostname()

    def find(self, key: str) -> str:
        """Returns the ID of an image; empty if it is not listed."""
        return self._read(self.directory / key)[0]

    def add(self, key: str, image: str, owner: str, client: docker.DockerClient) -> None:
        """Adds an image. Removes those with other locks of the same owner: a source and a tag."""
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in self.directory.iterdir():
            earlier, of = self._read(path)
            if of == owner:
                path.unlink(missing_ok=True)
                if earlier != image:
                    with contextlib.suppress(docker.errors.APIError):  # it is gone, or another job uses it
                        client.images.remove(earlier)
        content = json.dumps({"image": image, "owner": owner})
        (self.directory / key).write_text(content)

    def _read(self, path: Path) -> tuple[str, str]:
        try:
            if trust.find_stranger(path):
                return "", ""
            entry = json.loads(read_file(path, MOST_RECORD))
            return str(entry["image"]), str(entry["owner"])
        except (OSError, ValueError, KeyError, TypeError):
            return "", ""
