"""Runs commands inside the hosts of running jobs, and inside new containers of images."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Sequence

import docker
import docker.errors

from shoal import docker_client
from shoal.docker_client import containers, terminal
from shoal.errors import DockerError, UsageError, did_you_mean
from shoal.jobs import gpus, processes
from shoal.jobs.hosts.docker_objects import find_containers
from shoal.jobs.job import LOCAL
from shoal.jobs.store import KnownJob, list_host_trees
from shoal.jobs.volumes import Volume

SHELL = ["sh", "-c", "command -v bash >/dev/null && exec bash || exec sh"]
"""Starts bash, or sh in an image without it."""
_CODE = "/opt/ml/code"
_WAIT = ["sleep", "infinity"]


def run_in_host(found: KnownJob, host: str | None, command: Sequence[str]) -> int:
    """Runs a command in a host of a running job, in the directory of the code, and returns its exit code.

    Without Docker it gets the variables of the host's `train`.

    Args:
        host: The name of the host; None: the first one.

    Raises:
        UsageError: If the job has no such host.
        DockerError: If the host does not run, or Docker does not answer.
    """
    if found.record.request.engine == LOCAL:
        return _run_in_local_host(found, host, command)
    names = found.record.request.host_names
    name = choose_host(found.name, host, names)
    client = docker_client.connect(timeout=None)
    problem = f"{found.name}: the host {name} does not run"
    fix = f"Fix: try again when it has started, or choose another with --host ({', '.join(names)})"
    container = find_containers(client, found.identity, [name]).get(name)
    if container is None:
        raise DockerError(f"{problem}. {fix}")
    try:
        return terminal.run_in_container(client, str(container.id), command, _CODE)
    except docker.errors.APIError as error:
        if error.status_code not in (404, 409):  # missing, not running
            raise
        raise DockerError(f"{problem}: {error.explanation}. {fix}") from error


def choose_host(job: str, host: str | None, names: Sequence[str]) -> str:
    """Returns a host of a job by name, by default the first. Raises `UsageError` if there is no such host."""
    if host is None:
        return names[0]
    if host not in names:
        raise UsageError(
            f"--host {host}: {job} has no such host.{did_you_mean(host, names)} Fix: use one of {', '.join(names)}"
        )
    return host


def _run_in_local_host(found: KnownJob, host: str | None, command: Sequence[str]) -> int:
    """Runs a command on this machine, with the variables of a host's `train`, and returns its exit code."""
    trees = {tree.name: tree for tree in list_host_trees(found.directory)}
    if not trees:
        raise DockerError(f"{found.name}: no host has started. Fix: try again")
    tree = trees[choose_host(found.name, host, list(trees))]
    found_processes = processes.list_descendants(tree, found.record.pid)
    if not found_processes:
        raise DockerError(f"{found.name}: {tree.name} has no process. Fix: try again when the host has started")
    environment = processes.read_environment(found_processes[0])
    process = subprocess.Popen(command, cwd=tree / "code", env=environment)
    earlier = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the command, such as a debugger
    try:
        code = process.wait()
    finally:
        signal.signal(signal.SIGINT, earlier)
    return 128 - code if code < 0 else code


def open_shell(image: str, volumes: Sequence[Volume]) -> int:
    """Starts a shell in a new container of an image, which is removed at the end, and returns the shell's exit code.

    Raises `DockerError` if Docker does not have the image.
    """
    client = docker_client.connect(timeout=None)
    label = containers.unique_name("shell")
    settings = {
        "entrypoint": _WAIT[:1],
        "init": True,
        "labels": {containers.JOB_LABEL: label},
        "mounts": [mount for volume in volumes for mount in volume.to_mounts()],
        "device_requests": gpus.device_requests((gpus.ALL,)) if docker_client.has_gpus(client) else [],
    }
    with containers.remove_at_end(client, label):
        container = containers.create_container(client, image, _WAIT[1:], settings)
        container.start()
        return terminal.run_in_container(client, str(container.id), SHELL)
