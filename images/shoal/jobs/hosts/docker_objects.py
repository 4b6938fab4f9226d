"""The objects of a job in Docker: its network, its volume, and the settings, logs and exits of its containers."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterable
from typing import Any

import docker
import docker.errors
import docker.types
import requests
from docker.models.containers import Container
from docker.models.networks import Network

from shoal import docker_client
from shoal.docker_client import containers
from shoal.errors import DockerError, UsageError
from shoal.jobs import checkpoints, job, train_events, variables
from shoal.jobs.job_log import JobLog
from shoal.jobs.processes import STOP_SECONDS
from shoal.jobs.run import Arrival, HostExit
from shoal.jobs.train_events import HostOutput
from shoal.jobs.usage import GpuMeter, Usage, read_lines, smi_command
from shoal.jobs.view import View
from shoal.jobs.volumes import Volume

_STOP_MARGIN = 5
_LEAST_PROCESSES = 1024  # of a host
SECRET_PATH = "run/shoal-job-secret"
"""The file with the job's secret, relative to the container's root. `docker inspect` would show an environment."""
_CHECKPOINTS = f"opt/ml/{checkpoints.CONTENT}"


def volume_name(identity: str) -> str:
    """Returns the name of the volume with the checkpoints of a job."""
    return f"shoal-{identity}"


def find_containers(client: docker.DockerClient, identity: str, hosts: Iterable[str]) -> dict[str, Container]:
    """Returns the containers of a job by host, in the order of the hosts. Those without a container are left out."""
    found = client.containers.list(all=True, filters={"label": f"{containers.JOB_LABEL}={identity}"})
    by_host = {host: [each for each in found if str(each.name).endswith(f"-{host}")] for host in hosts}
    return {host: each[0] for host, each in by_host.items() if each}


def remove_earlier(client: docker.DockerClient, name: str, identity: str, keep_volume: bool) -> bool:
    """Removes the objects of an earlier command for a job from Docker, and returns whether its volume is kept.

    Raises `UsageError` if a container of the job still runs.
    """
    if client.containers.list(filters={"label": f"{containers.JOB_LABEL}={identity}"}):
        raise UsageError(
            f"--resume {name}: the job still runs in Docker, but its command has been killed. Fix: shoal stop {name},"
            " and repeat this command"
        )
    containers.remove_objects(client, identity, volumes=not keep_volume)
    try:
        client.volumes.get(volume_name(identity))
    except docker.errors.NotFound:
        return False
    return True


def create_network(client: docker.DockerClient, identity: str) -> Network:
    """Creates the job's network, with the MTU of Docker's default network if there is one. A signal waits meanwhile."""
    key = "com.docker.network.driver.mtu"
    options: dict[str, str] = {}
    with contextlib.suppress(docker.errors.NotFound):
        options = client.networks.get("bridge").attrs.get("Options") or {}
    mtu = {key: options[key]} if key in options else {}
    labels = {containers.JOB_LABEL: identity}
    with containers.delay_interrupts():
        return client.networks.create(f"shoal-{identity}", driver="bridge", options=mtu, labels=labels)


def container_settings(request: job.JobRequest, name: str, identity: str, network: str) -> dict[str, Any]:
    """Returns the settings that the containers of all hosts share: environment, label, mounts, network and limits.

    The request's environment wins over defaults, except over the job's name. The secret itself is not among them.
    """
    channels = (
        Volume(path, f"/opt/ml/input/data/{channel}", read_only=True) for channel, path in request.channels.items()
    )
    mounts = [mount for volume in (*channels, *request.volumes) for mount in volume.to_mounts()]
    own = {key: value for key, value in request.environment.items() if key != job.SECRET}
    return {
        "environment": {
            "SHOAL_STOP_GRACE": str(STOP_SECONDS),
            **({"SAGEMAKER_SUBMIT_DIRECTORY": "/opt/ml/code"} if request.source else {}),
            **request.script_variables,
            job.SECRET_FILE: f"/{SECRET_PATH}",
            **job.MEMBERS_ONLY,
            **train_events.SWITCH,
            **variables.locate_secrets(request.secrets),
            **job.limit_variables(request.max_restarts, request.min_hosts),
            **own,
            "TRAINING_JOB_NAME": name,
        },
        "labels": {containers.JOB_LABEL: identity},
        "mounts": [*mounts, docker.types.Mount(f"/{_CHECKPOINTS}", volume_name(identity), type="volume")],
        "network": network,
        "shm_size": request.shm_size or job.SHM_SIZE,
        "mem_limit": request.memory,
        "nano_cpus": None if request.cpus is None else round(request.cpus * 1e9),
        # Otherwise a script that forks for ever leaves no process to end it with.
        "pids_limit": max(_LEAST_PROCESSES, containers.most_processes() // request.hosts),
    }


def start_log_reader(container_id: str, host: str, view: View, log: JobLog) -> threading.Thread:
    """Starts a thread that shows and keeps a host's log; return once it is attached, so that no line is lost."""
    attached = threading.Event()

    def print_lines() -> None:
        """Body of the thread."""
        try:
            api = docker_client.connect(timeout=None).api  # clients are not shared between threads
            stream = api.attach(container_id, stdout=True, stderr=True, stream=True, logs=True)
        finally:
            attached.set()
        with containers.close_at_end(stream):
            for chunk in HostOutput(host, log).read(stream):
                for text, line, is_overwritten in chunk.lines:
                    view.add(f"{host} | {text}", line, is_overwritten)

    thread = threading.Thread(target=print_lines, name=f"logs of {host}", daemon=True)
    thread.start()
    attached.wait()
    return thread


def report_exit(host: str, container_id: str, arrivals: queue.SimpleQueue[Arrival]) -> None:
    """Body of a thread: wait until a container ends, and put its exit, or the error of Docker, into the queue."""
    try:
        # Without a timeout, because training may print nothing for hours.
        api = docker_client.connect(timeout=None).api
        code = int(api.wait(container_id)["StatusCode"])
        out_of_memory = False
        with contextlib.suppress(docker.errors.NotFound):  # somebody has removed it, which ends it too
            out_of_memory = bool(api.inspect_container(container_id)["State"].get("OOMKilled"))
        arrivals.put((host, container_id, HostExit(code, out_of_memory)))
    except (docker.errors.DockerException, requests.RequestException, DockerError) as error:
        arrivals.put((host, container_id, error))


def measure_gpus(host: str, container_id: str, meter: GpuMeter) -> None:
    """Body of a thread: run nvidia-smi in a container, which ends with it, and read its lines.

    Without nvidia-smi, or after an error of Docker, the use is unknown.
    """
    with contextlib.suppress(docker.errors.DockerException, requests.RequestException, DockerError):
        api = docker_client.connect(timeout=None).api
        process = api.exec_create(container_id, smi_command(), stderr=False)
        with containers.close_at_end(api.exec_start(process["Id"], stream=True)) as stream:
            read_lines(containers.split_lines(stream), host, meter)


def read_usage(api: docker.APIClient, container_id: str) -> Usage | None:
    """Returns the CPU time and memory of a container; None if it does not run."""
    try:
        stats = api.stats(container_id, stream=False, one_shot=True)
        cache = stats["memory_stats"].get("stats", {}).get("inactive_file", 0)
        return Usage(stats["cpu_stats"]["cpu_usage"]["total_usage"] / 1e9, stats["memory_stats"]["usage"] - cache)
    except (docker.errors.APIError, KeyError):
        return None


def stop_containers(ids: Iterable[str]) -> None:
    """Stops containers, all at the same time, and waits for them; an interrupt ends the wait."""
    threads = [threading.Thread(target=_stop_container, args=(each,), daemon=True) for each in ids]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _stop_container(container_id: str) -> None:
    """Stops a container; Docker kills it 35 s later. Errors are ignored: it is removed by force later."""
    with contextlib.suppress(docker.errors.DockerException, requests.RequestException, DockerError):
        docker_client.connect().api.stop(container_id, timeout=STOP_SECONDS + _STOP_MARGIN)
