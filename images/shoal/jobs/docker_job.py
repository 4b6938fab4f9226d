"""Runs a job in containers: one a host, on a network of their own; everything is removed at the end, however it ends.

The trees that become /opt/ml travel over the engine's archive interface, so the engine may be on another machine;
channels are bind mounts, because data may be large: their directories must lie where the engine runs.
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
"""How long the script may take to end when the job is interrupted, in seconds."""
_STOP_MARGIN = 5
SECRET_PATH = "run/shoal-job-secret"
"""Where a host has the job's secret, from its root: not in its configuration, which `docker inspect` prints."""
STRAGGLER_SECONDS = 60
"""How long the other hosts may take to end once one has ended, in seconds: all end with the job's one verdict."""


@dataclass(frozen=True)
class _Ended:
    """A host's end: its exit code, and whether the kernel's out-of-memory killer ended it."""

    exit_code: int
    out_of_memory: bool


def run(image: str, request: job.JobRequest, console: Console) -> job.Outcome:
    """Run `request` in containers of `image`; stream their logs with the host in front; return the outcome.

    `request` is checked by the caller. Raises `DockerError` when the engine refuses. An interrupt stops the hosts,
    removes them and the network, and is raised again; a second one removes them at once.
    """
    client = docker_client.connect()
    name = job.new_name(request)
    directory = job.make_directory(request, name)
    with containers.remove_at_end(client, name):
        hosts = _create_hosts(client, image, request, name, console)
        readers = [_stream(str(container.id), host, console) for host, container in hosts.items()]
        for container in hosts.values():
            container.start()
        try:
            ended = _wait(hosts)
        except BaseException:
            for host, container in hosts.items():  # what the script saved while it ended
                _fetch(container, directory / host, console)
            console.print(
                f"interrupted; what the hosts had written lies in {directory}", soft_wrap=True, highlight=False
            )
            raise
        for reader in readers:
            reader.join()
        trees = {host: _fetch(container, directory / host, console) for host, container in hosts.items()}
    notes = {host: "killed by the out-of-memory killer" for host, end in ended.items() if end.out_of_memory}
    return job.outcome(name, {host: end.exit_code for host, end in ended.items()}, directory, trees, notes)


def _create_hosts(
    client: docker.DockerClient, image: str, request: job.JobRequest, name: str, console: Console
) -> dict[str, Container]:
    """Create (not start) the network and the hosts, each with its /opt/ml, its GPUs and the job's secret."""
    say = functools.partial(console.print, markup=False, soft_wrap=True)
    devices = gpus.divide(client, image, request.gpus, request.host_names, say)
    network = _create_network(client, name)
    settings = _settings(request, name, str(network.name))
    secret = request.secret()
    with TemporaryDirectory(prefix="shoal-job-") as scratch, TemporaryFile() as common:
        tree = Path(scratch)
        job.write_tree(tree, request, name)
        archive.pack_tree(tree, "opt/ml", common)
        hosts = {}
        for host, given in zip(request.host_names, devices):
            alias = client.api.create_endpoint_config(aliases=[host])
            own = {
                "name": f"{name}-{host}",
                "networking_config": {network.name: alias},
                "device_requests": gpus.settings(given),
                "environment": {**gpus.variables(given), **settings["environment"]},
            }
            hosts[host] = containers.create_container(client, image, ["train"], {**settings, **own})
            common.seek(0)
            hosts[host].put_archive("/", common)
            hosts[host].put_archive("/", archive.pack_file("opt/ml/" + job.RESOURCES, job.resources(request, host)))
            if secret:
                hosts[host].put_archive("/", archive.pack_file(SECRET_PATH, secret.encode()))
    return hosts


def _create_network(client: docker.DockerClient, name: str) -> Network:
    """Create the job's network. Its packets are no larger than the engine's default network, if any, allows."""
    key = "com.docker.network.driver.mtu"
    options: dict[str, str] = {}
    with contextlib.suppress(docker.errors.NotFound):
        options = client.networks.get("bridge").attrs.get("Options") or {}
    mtu = {key: options[key]} if key in options else {}
    labels = {containers.JOB_LABEL: name}
    with containers.delay_interrupts():
        return client.networks.create(f"shoal-{name}", driver="bridge", options=mtu, labels=labels)


def _settings(request: job.JobRequest, name: str, network: str) -> dict[str, Any]:
    """What the containers of all hosts have in common."""
    mounts = [
        docker.types.Mount(f"/opt/ml/input/data/{channel}", str(path.resolve()), type="bind", read_only=True)
        for channel, path in request.channels.items()
    ]
    given = {key: value for key, value in request.environment.items() if key != job.SECRET}
    return {
        "environment": {
            "SHOAL_STOP_GRACE": str(STOP_SECONDS),
            "SAGEMAKER_SUBMIT_DIRECTORY": "/opt/ml/code",
            **request.script_variables,
            job.SECRET_FILE: f"/{SECRET_PATH}",
            **given,
            "TRAINING_JOB_NAME": name,
        },
        "labels": {containers.JOB_LABEL: name},
        "mounts": mounts,
        "network": network,
        "shm_size": request.shm_size,
        "mem_limit": request.memory,
    }


def _stream(container_id: str, host: str, console: Console) -> threading.Thread:
    """Print a host's output as it comes, a line at a time, from before its first line on."""
    attached = threading.Event()

    def follow() -> None:
        try:
            api = docker_client.connect(timeout=None).api  # a client of its own: one a thread
            stream = api.attach(container_id, stdout=True, stderr=True, stream=True, logs=True)
        finally:
            attached.set()
        for line in containers.split_lines(stream):
            console.print(f"{host} | {line}", markup=False, highlight=False, soft_wrap=True)

    thread = threading.Thread(target=follow, name=f"logs of {host}", daemon=True)
    thread.start()
    attached.wait()
    return thread


def _wait(hosts: dict[str, Container]) -> dict[str, _Ended]:
    """Wait until every host ended. When one has, the others get `STRAGGLER_SECONDS`, then they are stopped."""
    arrivals: queue.SimpleQueue[tuple[str, _Ended | Exception]] = queue.SimpleQueue()
    for host, container in hosts.items():
        threading.Thread(target=_report_end, args=(host, str(container.id), arrivals), daemon=True).start()
    ended: dict[str, _Ended] = {}
    deadline: float | None = None
    try:
        while len(ended) < len(hosts):
            try:
                host, end = arrivals.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                _stop(container for host, container in hosts.items() if host not in ended)
                deadline = None
                continue
            if isinstance(end, Exception):
                raise DockerError(f"the engine was lost while {host} ran: {end}") from end
            ended[host] = end
            deadline = time.monotonic() + STRAGGLER_SECONDS
    except BaseException:
        print(f"shoal: stopping; the script has {STOP_SECONDS} s to end (interrupt again: at once)", file=sys.stderr)
        _stop(hosts.values())
        raise
    return {host: ended[host] for host in hosts}


def _report_end(host: str, container_id: str, arrivals: queue.SimpleQueue[tuple[str, _Ended | Exception]]) -> None:
    try:
        # A client of its own, and no limit: training is silent for as long as it likes.
        api = docker_client.connect(timeout=None).api
        code = int(api.wait(container_id)["StatusCode"])
        state = api.inspect_container(container_id)["State"]
        arrivals.put((host, _Ended(code, bool(state.get("OOMKilled")))))
    except (docker.errors.DockerException, requests.RequestException, DockerError) as error:
        arrivals.put((host, error))


def _stop(containers: Iterable[Container]) -> None:
    """Tell all to stop at once, and wait for them; an interrupt ends the waiting."""
    threads = [threading.Thread(target=_stop_one, args=(str(each.id),), daemon=True) for each in containers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _stop_one(container_id: str) -> None:
    with contextlib.suppress(docker.errors.DockerException, requests.RequestException, DockerError):
        docker_client.connect().api.stop(
            container_id, timeout=STOP_SECONDS + _STOP_MARGIN
        )  # what does not stop is removed by force


def _fetch(container: Container, target: Path, console: Console) -> Path:
    """Copy the host's model, output and checkpoints out of its container."""
    target.mkdir()
    for part in ("model", "output", "checkpoints"):
        try:
            chunks, _ = container.get_archive(f"/opt/ml/{part}")
        except docker.errors.NotFound:
            continue
        with TemporaryFile() as buffer:
            for chunk in chunks:
                buffer.write(chunk)
            buffer.seek(0)
            for skipped in archive.unpack_safely(buffer, target):
                console.print(
                    containers.strip_controls(f"{target.name}: not collected: {skipped}"), markup=False, soft_wrap=True
                )
    return target
