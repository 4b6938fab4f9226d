"""Runs a job in containers, one per host, on a network of their own. All of them are removed when the job ends.

The trees that become /opt/ml are copied over Docker's API, so Docker may run on another machine. Channels are mounted,
as data may be large: their directories must exist on Docker's machine.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any

import docker
import docker.errors
import docker.types
import requests
from docker.models.containers import Container
from docker.models.networks import Network
from rich.console import Console

from shoal import docker_client
from shoal.docker_client import archive, containers
from shoal.errors import DockerError
from shoal.jobs import gpus, job

STOP_SECONDS = 30
"""How long the script may take to end after an interrupt."""
_STOP_MARGIN = 5
SECRET_PATH = "run/shoal-job-secret"
"""The file with the job's secret, relative to the container's root. `docker inspect` would show an environment."""
STRAGGLER_SECONDS = 60
"""How long the other hosts may run after the first has ended. All hosts of a job end with one result."""


@dataclass(frozen=True)
class _HostExit:
    """How a host's container ended."""

    exit_code: int
    out_of_memory: bool
    """Whether the kernel's out-of-memory killer ended it."""


def run_job_in_docker(image: str, request: job.JobRequest, console: Console) -> job.JobResult:
    """Run a job in containers to its end, and print the hosts' logs with the host's name before each line.

    The files of each host are copied to the job's directory. An interrupt stops the hosts, removes them and the
    network, and is raised again. A second interrupt removes them without waiting for the script.

    Args:
        image: The tag of the image.
        request: The job, which the caller has checked.
        console: The console for logs and messages.

    Returns:
        The result. A job that failed raises nothing.

    Raises:
        DockerError: If Docker does not answer, refuses, or lacks the image.
        UsageError: If the job's directory cannot be created, the source cannot be copied, or there are fewer GPUs than
            hosts.
    """
    client = docker_client.connect()
    name = job.make_job_name(request)
    directory = job.make_job_directory(request, name)
    with containers.remove_at_end(client, name):
        hosts = _create_hosts(client, image, request, name, console)
        readers = [_start_log_reader(str(container.id), host, console) for host, container in hosts.items()]
        for container in hosts.values():
            container.start()
        try:
            exits = _wait(hosts)
        except BaseException:
            for host, container in hosts.items():  # the script may have saved files before it ended
                _fetch_results(container, directory / host, console)
            console.print(f"interrupted; files of the hosts are in {directory}", soft_wrap=True, highlight=False)
            raise
        for reader in readers:
            reader.join()
        trees = {host: _fetch_results(container, directory / host, console) for host, container in hosts.items()}
    notes = {host: "killed by the out-of-memory killer" for host, end in exits.items() if end.out_of_memory}
    return job.read_result(name, {host: end.exit_code for host, end in exits.items()}, directory, trees, notes)


def _create_hosts(
    client: docker.DockerClient, image: str, request: job.JobRequest, name: str, console: Console
) -> dict[str, Container]:
    """Create the network and the containers, each with its /opt/ml, its GPUs and the job's secret. Start nothing.

    If it fails, the caller removes those that exist already, by their label.
    """
    say = functools.partial(console.print, markup=False, soft_wrap=True)
    devices = gpus.divide_gpus(client, image, request.gpus, request.host_names, say)
    network = _create_network(client, name)
    settings = _container_settings(request, name, str(network.name))
    secret = job.make_secret(request.environment)
    with TemporaryDirectory(prefix="shoal-job-") as scratch, TemporaryFile() as packed_tree:
        tree = Path(scratch)
        job.write_tree(tree, request, name)
        archive.pack_tree(tree, "opt/ml", packed_tree)
        hosts = {}
        for host, own_devices in zip(request.host_names, devices):
            alias = client.api.create_endpoint_config(aliases=[host])
            own = {
                "name": f"{name}-{host}",
                "networking_config": {network.name: alias},
                "device_requests": gpus.device_requests(own_devices),
                "environment": {**gpus.gpu_environment(own_devices), **settings["environment"]},
            }
            hosts[host] = containers.create_container(client, image, ["train"], {**settings, **own})
            packed_tree.seek(0)
            hosts[host].put_archive("/", packed_tree)
            config = job.encode_resource_config(request, host)
            hosts[host].put_archive("/", archive.pack_file("opt/ml/" + job.RESOURCE_CONFIG, config))
            if secret:
                hosts[host].put_archive("/", archive.pack_file(SECRET_PATH, secret.encode(), 0o600))
    return hosts


def _create_network(client: docker.DockerClient, name: str) -> Network:
    """Create the job's network, with the MTU of Docker's default network if there is one. A signal waits meanwhile."""
    key = "com.docker.network.driver.mtu"
    options: dict[str, str] = {}
    with contextlib.suppress(docker.errors.NotFound):
        options = client.networks.get("bridge").attrs.get("Options") or {}
    mtu = {key: options[key]} if key in options else {}
    labels = {containers.JOB_LABEL: name}
    with containers.delay_interrupts():
        return client.networks.create(f"shoal-{name}", driver="bridge", options=mtu, labels=labels)


def _container_settings(request: job.JobRequest, name: str, network: str) -> dict[str, Any]:
    """Return the settings that the containers of all hosts share: environment, label, channels, network and memory.

    The request's environment wins over defaults, except over the job's name. The secret itself is not among them.
    """
    mounts = [
        docker.types.Mount(f"/opt/ml/input/data/{channel}", str(path.resolve()), type="bind", read_only=True)
        for channel, path in request.channels.items()
    ]
    own = {key: value for key, value in request.environment.items() if key != job.SECRET}
    return {
        "environment": {
            "SHOAL_STOP_GRACE": str(STOP_SECONDS),
            "SAGEMAKER_SUBMIT_DIRECTORY": "/opt/ml/code",
            **request.script_variables,
            job.SECRET_FILE: f"/{SECRET_PATH}",
            **own,
            "TRAINING_JOB_NAME": name,
        },
        "labels": {containers.JOB_LABEL: name},
        "mounts": mounts,
        "network": network,
        "shm_size": request.shm_size,
        "mem_limit": request.memory,
    }


def _start_log_reader(container_id: str, host: str, console: Console) -> threading.Thread:
    """Start a thread that prints a host's log line by line; return once it is attached, so that no line is lost."""
    attached = threading.Event()

    def print_lines() -> None:
        """Body of the thread."""
        try:
            api = docker_client.connect(timeout=None).api  # clients are not shared between threads
            stream = api.attach(container_id, stdout=True, stderr=True, stream=True, logs=True)
        finally:
            attached.set()
        for line in containers.split_lines(stream):
            console.print(f"{host} | {line}", markup=False, highlight=False, soft_wrap=True)

    thread = threading.Thread(target=print_lines, name=f"logs of {host}", daemon=True)
    thread.start()
    attached.wait()
    return thread


def _wait(hosts: dict[str, Container]) -> dict[str, _HostExit]:
    """Wait until all hosts have ended, and return how.

    `STRAGGLER_SECONDS` after the last one that ended, stop the others.

    An interrupt, or the loss of the connection to Docker, prints a message and stops all hosts. It is raised, the loss
    as `DockerError`.
    """
    arrivals: queue.SimpleQueue[tuple[str, _HostExit | Exception]] = queue.SimpleQueue()
    for host, container in hosts.items():
        threading.Thread(target=_report_exit, args=(host, str(container.id), arrivals), daemon=True).start()
    exits: dict[str, _HostExit] = {}
    deadline: float | None = None
    try:
        while len(exits) < len(hosts):
            try:
                host, end = arrivals.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                _stop(container for host, container in hosts.items() if host not in exits)
                deadline = None
                continue
            if isinstance(end, Exception):
                raise DockerError(f"lost the connection to Docker while {host} ran: {end}") from end
            exits[host] = end
            deadline = time.monotonic() + STRAGGLER_SECONDS
    except BaseException:
        print(
            f"shoal: stopping; the script has {STOP_SECONDS} s to end (interrupt again to stop at once)",
            file=sys.stderr,
        )
        _stop(hosts.values())
        raise
    return {host: exits[host] for host in hosts}


def _report_exit(host: str, container_id: str, arrivals: queue.SimpleQueue[tuple[str, _HostExit | Exception]]) -> None:
    """Body of a thread: wait until a container ends, and put its exit, or the error of Docker, into the queue."""
    try:
        # Without a timeout, because training may print nothing for hours.
        api = docker_client.connect(timeout=None).api
        code = int(api.wait(container_id)["StatusCode"])
        state = api.inspect_container(container_id)["State"]
        arrivals.put((host, _HostExit(code, bool(state.get("OOMKilled")))))
    except (docker.errors.DockerException, requests.RequestException, DockerError) as error:
        arrivals.put((host, error))


def _stop(containers: Iterable[Container]) -> None:
    """Stop containers, all at the same time, and wait for them; an interrupt ends the wait."""
    threads = [threading.Thread(target=_stop_container, args=(str(each.id),), daemon=True) for each in containers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _stop_container(container_id: str) -> None:
    """Stop a container; Docker kills it 35 s later. Errors are ignored: it is removed by force later."""
    with contextlib.suppress(docker.errors.DockerException, requests.RequestException, DockerError):
        docker_client.connect().api.stop(container_id, timeout=STOP_SECONDS + _STOP_MARGIN)


def _fetch_results(container: Container, target: Path, console: Console) -> Path:
    """Copy model, output and checkpoints from a container to `target`, which is created, and return it.

    Directories that the container does not have are left out. Files that are not copied, such as devices, are printed.
    """
    target.mkdir()
    for part in ("model", "output", "checkpoints"):
        with (
            contextlib.suppress(docker.errors.NotFound),
            containers.read_archive(container, f"/opt/ml/{part}") as file,
        ):
            for skipped in archive.unpack_safely(file, target):
                text = containers.strip_controls(f"{target.name}: not collected: {skipped}")
                console.print(text, markup=False, soft_wrap=True)
    return target
