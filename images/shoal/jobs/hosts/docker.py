"""The containers of a job: one for each host, on a network of their own, with one volume for checkpoints.

The trees that become /opt/ml are copied over Docker's API, so Docker may run on another machine. Channels are mounted,
as data may be large: their directories must exist on Docker's machine.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import tarfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import IO, Any

import docker
import docker.errors
import docker.types
import requests
import urllib3.exceptions
from docker.models.containers import Container
from docker.models.networks import Network
from rich.console import Console

from shoal import docker_client
from shoal.console import print_line
from shoal.docker_client import archive, containers, images
from shoal.docker_client.users import ROOT, Owner, find_owner
from shoal.errors import DockerError, ShoalError, UsageError
from shoal.jobs import checkpoints, gpus, job, results, run, variables
from shoal.jobs.job_log import JobLog
from shoal.jobs.run import STOP_SECONDS, Arrival, HostExit
from shoal.jobs.usage import GpuMeter, Usage, read_lines, smi_command
from shoal.jobs.view import View
from shoal.jobs.volumes import Volume
from shoal.limits import GIB, MOST_PROCESSES
from shoal.tar_stream import open_stream

_STOP_MARGIN = 5
_LEAST_PROCESSES = 1024  # of a host
_DOCKER_LOG = "64m"
_LIST_SECONDS = 10
_SHOWN_OMISSIONS = 20  # of a directory
SECRET_PATH = "run/shoal-job-secret"
"""The file with the job's secret, relative to the container's root. `docker inspect` would show an environment."""
_ML = "/opt/ml"
_CHECKPOINTS = f"opt/ml/{checkpoints.CONTENT}"

NOT_COLLECTED = (
    ShoalError,
    OSError,
    ValueError,
    tarfile.TarError,
    docker.errors.DockerException,
    urllib3.exceptions.HTTPError,
)
"""Errors of a copy from a container. The result of a job does not depend on them."""


@dataclass
class DockerHosts:
    """The containers of a job's hosts. Each can be made again, with the same name, settings, files and volume."""

    client: docker.DockerClient
    request: job.JobRequest
    name: str
    """The job's name."""
    identity: str
    """The label of the job's objects, which no other job has."""
    view: View
    """Shows the hosts' logs."""
    tree: IO[bytes]
    """The archive with the files of all hosts."""
    secret: str | None
    devices: Mapping[str, gpus.Devices]
    """The GPUs of each host."""
    network: str
    log: JobLog
    """Keeps the lines of all hosts."""
    owner: Owner = ROOT
    """The user of the containers, who gets all files that are copied into them."""
    cpus: Mapping[str, str] = field(default_factory=dict)
    """The variable with the number of CPUs of each host, if they share the machine."""
    secrets: Mapping[str, bytes] = field(default_factory=dict)
    """The user's secrets, by name."""
    by_name: dict[str, Container] = field(default_factory=dict)
    arrivals: queue.SimpleQueue[Arrival] = field(default_factory=queue.SimpleQueue)
    """Containers that have ended."""
    readers: list[threading.Thread] = field(default_factory=list)
    """The threads that print logs."""
    meter: GpuMeter = field(default_factory=GpuMeter)
    """Reads the use of GPUs."""

    @property
    def ids(self) -> dict[str, str]:
        """The ID of each host's container."""
        return {host: str(container.id) for host, container in self.by_name.items()}

    @property
    def console(self) -> Console:
        """The console for messages."""
        return self.view.console

    @property
    def first(self) -> str:
        """The name of the host that decides for all."""
        return self.request.host_names[0]

    def create(self, host: str, environment: Mapping[str, str] | None = None) -> None:
        """Create the container of a host with its /opt/ml, its GPUs and the job's secret, and remove an earlier one.

        Args:
            host: The name of the host.
            environment: More variables than the job's own.
        """
        settings = _container_settings(self.request, self.name, self.identity, self.network)
        merged = {
            **gpus.gpu_environment(self.devices[host]),
            **self.cpus,
            **settings["environment"],
            **(environment or {}),
        }
        own = {
            "name": f"{self.identity}-{host}",  # other users' jobs may have the same name
            "networking_config": {self.network: self.client.api.create_endpoint_config(aliases=[host])},
            "device_requests": gpus.device_requests(self.devices[host]),
            "environment": merged,
        }
        with containers.delay_interrupts():  # between the two, no container could give the files of the volume
            if earlier := self.by_name.get(host):
                with contextlib.suppress(docker.errors.NotFound):
                    earlier.remove(force=True, v=True)
            command = self.request.train_command
            container = containers.create_container(self.client, self.request.image, command, {**settings, **own})
            self.by_name[host] = container
        self.tree.seek(0)
        container.put_archive("/", self.tree)
        config = job.encode_resource_config(self.request.host_names, host)
        container.put_archive("/", archive.pack_file("opt/ml/" + job.RESOURCE_CONFIG, config, 0o644, self.owner))
        files = {f"{variables.SECRETS[1:]}/{name}": content for name, content in self.secrets.items()}
        if self.secret:
            files[SECRET_PATH] = self.secret.encode()
        for path, content in files.items():
            container.put_archive("/", archive.pack_file(path, content, 0o400, self.owner))

    def start(self, *hosts: str) -> None:
        """Start containers, and threads that print their logs and put their exits into `arrivals`."""
        for host in hosts:
            self.readers.append(_start_log_reader(str(self.by_name[host].id), host, self.view, self.log))
        for host in hosts:
            try:
                self.by_name[host].start()
            except docker.errors.APIError as error:
                raise images.explain_start(self.request.image, error) from error
        for host in hosts:
            arguments = (host, str(self.by_name[host].id), self.arrivals)
            threading.Thread(target=_report_exit, args=arguments, daemon=True).start()
            if self.devices[host]:
                measured = (host, str(self.by_name[host].id), self.meter)
                threading.Thread(target=_measure_gpus, args=measured, daemon=True).start()

    def stop(self, hosts: Iterable[str]) -> None:
        """Stop containers, all at the same time, and wait for them; an interrupt ends the wait."""
        stop_containers(str(self.by_name[host].id) for host in hosts)

    def kill(self) -> None:
        """Kill all containers that still run."""
        for container in self.by_name.values():
            with contextlib.suppress(docker.errors.APIError):  # it has ended
                container.kill()

    def fill(self, directory: checkpoints.CheckpointDirectory) -> None:
        """Copy checkpoints into the volume."""
        if directory.has_files():
            with TemporaryFile(dir=directory.path.parent) as packed:
                directory.pack(_CHECKPOINTS, packed, self.owner)
                self.by_name[self.first].put_archive("/", packed)

    def collect(self, directory: checkpoints.CheckpointDirectory) -> None:
        """Replace the content of a directory by the volume's. Files that are not copied are printed.

        An interrupt waits meanwhile, but not for longer than `containers.HANGS`.
        """
        with (
            containers.delay_interrupts(),
            directory.replace() as scratch,
            containers.read_archive(self._find_container(), f"/{_CHECKPOINTS}") as file,
        ):
            self._print_omissions("", archive.unpack_safely(file, scratch, _ML))

    def _find_container(self) -> Container:
        """Return a container that still exists, or the first one. All of them have the volume."""
        filters = {"label": f"{containers.JOB_LABEL}={self.identity}"}
        present = {each["Id"] for each in self.client.api.containers(all=True, filters=filters)}
        found = (container for container in self.by_name.values() if container.id in present)
        return next(found, self.by_name[self.first])

    def fetch_results(self, host: str, target: Path) -> Path:
        """Copy model and output of a host to `target`, which is created, and return it.

        Directories that the container does not have are left out. Files that are not copied, such as devices, are
        printed. If a directory does not fit on the disk, nothing of it is kept, and that is printed.
        """
        target.mkdir()
        for part in ("output", "model"):
            try:
                with (
                    contextlib.suppress(docker.errors.NotFound),
                    containers.read_archive(self.by_name[host], f"{_ML}/{part}") as file,
                ):
                    self._print_omissions(f"{target.name}: ", archive.unpack_safely(file, target, _ML))
            except NOT_COLLECTED as error:
                results.remove_tree(target / part)
                self._print_skipped(f"{target.name}: {part} was not collected: {error}")
        return target

    def list_lost_files(self) -> list[str]:
        """Return the files that the script has written beside the code on the first host, relative to the code.

        They go with the container. Bytecode, and files of the image, which are older than the container, are left out.
        The list ends after some seconds, and at a large file.
        """
        container = self.by_name[self.first]
        created = datetime.fromisoformat(container.attrs["Created"]).timestamp()
        self.tree.seek(0)
        with tarfile.open(fileobj=self.tree) as packed:
            copied = set(packed.getnames())
        deadline = time.monotonic() + _LIST_SECONDS
        found = []
        with (
            # Docker's own list of changes can take hours, and the container cannot be removed meanwhile.
            containers.read_archive(container, "/opt/ml/code") as file,
            open_stream(file) as archive_of_code,
        ):
            for entry in archive_of_code:
                archive_of_code.members = []  # type: ignore[attr-defined]  # otherwise it keeps all of them
                is_known = f"opt/ml/{entry.name}" in copied or entry.mtime < int(created)
                if not (entry.isdir() or is_known or "__pycache__" in entry.name):
                    found.append(entry.name.removeprefix("code/"))
                if entry.size > GIB or time.monotonic() > deadline:
                    break
        return sorted(found)

    def read_usage(self) -> dict[str, Usage]:
        """Return the CPU time, memory and GPUs of the containers that run. Only one thread may call this."""
        found = {host: _read_usage(self._usage_client.api, number) for host, number in self.ids.items()}
        return {host: replace(usage, gpu=self.meter.read(host)) for host, usage in found.items() if usage}

    @functools.cached_property
    def _usage_client(self) -> docker.DockerClient:
        return docker_client.connect()  # clients are not shared between threads

    def _print_omissions(self, start: str, omissions: Iterable[str]) -> None:
        """Print the first files that are not copied, and the number of the others: a script can make millions."""
        count = 0
        for count, omission in enumerate(omissions, 1):
            if count <= _SHOWN_OMISSIONS:
                self._print_skipped(f"{start}not collected: {omission}")
        if count > _SHOWN_OMISSIONS:
            self._print_skipped(f"{start}not collected: {count - _SHOWN_OMISSIONS} more")

    def _print_skipped(self, text: str) -> None:
        print_line(text, self.console)

    def has_result(self, host: str) -> bool:
        """Return whether `train` has written a result on a host."""
        return any(self._read_file(host, f"output/{name}") is not None for name in ("success", "failure"))

    def read_restarts(self, host: str) -> list[dict[str, Any]]:
        """Return the restarts that `train` has listed in job.json on a host; none if it has not."""
        return run.parse_restarts(self._read_file(host, "output/job.json") or b"")

    def _read_file(self, host: str, path: str) -> bytes | None:
        return containers.read_file(self.by_name[host], f"{_ML}/{path}")


@contextlib.contextmanager
def create_hosts(
    client: docker.DockerClient,
    request: job.JobRequest,
    name: str,
    view: View,
    log: JobLog | None = None,
    identity: str | None = None,
) -> Iterator[DockerHosts]:
    """Create the network, the volume and the containers of a job, and yield them. Start nothing.

    The caller removes all of them at the end, by their label `identity`, by default the job's name. If the volume
    exists already, it is used.
    """
    identity = identity or name
    say = functools.partial(print_line, on=view.console)
    devices = gpus.divide_gpus(client, request.image, request.gpus, request.host_names, say)
    network = _create_network(client, identity)
    with containers.delay_interrupts():
        client.volumes.create(volume_name(identity), labels={containers.JOB_LABEL: identity})
    owner = find_owner(client, request.image, identity)
    with TemporaryFile() as tree:
        with TemporaryDirectory(prefix="shoal-job-") as scratch:
            job.write_tree(Path(scratch), request, name, mode=0o644)  # also for a script that changes its user
            archive.pack_tree(Path(scratch), "opt/ml", tree, owner)
        hosts = DockerHosts(
            client=client,
            request=request,
            name=name,
            identity=identity,
            view=view,
            tree=tree,
            secret=job.make_secret(request.environment),
            secrets=variables.read_secrets(request.secrets),
            devices=dict(zip(request.host_names, devices)),
            network=str(network.name),
            log=log or JobLog(),
            owner=owner,
            cpus=job.share_cpus(request, client.info()["NCPU"]) if request.hosts > 1 else {},
        )
        for host in request.host_names:
            hosts.create(host)
        yield hosts


def volume_name(identity: str) -> str:
    """Return the name of the volume with the checkpoints of a job."""
    return f"shoal-{identity}"


def find_containers(client: docker.DockerClient, identity: str, hosts: Iterable[str]) -> dict[str, Container]:
    """Return the containers of a job by host, in the order of the hosts. Those without a container are left out."""
    found = client.containers.list(all=True, filters={"label": f"{containers.JOB_LABEL}={identity}"})
    by_host = {host: [each for each in found if str(each.name).endswith(f"-{host}")] for host in hosts}
    return {host: each[0] for host, each in by_host.items() if each}


def remove_earlier(client: docker.DockerClient, name: str, identity: str, keep_volume: bool) -> bool:
    """Remove the objects of an earlier command for a job from Docker, and return whether its volume is kept.

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


def _create_network(client: docker.DockerClient, identity: str) -> Network:
    """Create the job's network, with the MTU of Docker's default network if there is one. A signal waits meanwhile."""
    key = "com.docker.network.driver.mtu"
    options: dict[str, str] = {}
    with contextlib.suppress(docker.errors.NotFound):
        options = client.networks.get("bridge").attrs.get("Options") or {}
    mtu = {key: options[key]} if key in options else {}
    labels = {containers.JOB_LABEL: identity}
    with containers.delay_interrupts():
        return client.networks.create(f"shoal-{identity}", driver="bridge", options=mtu, labels=labels)


def _read_most_processes() -> int:
    """Return how many processes and threads this machine can have. Docker may run on another machine.

    The kernel has two limits: of their numbers, and of the memory for them.
    """
    try:
        return min(int(Path("/proc/sys/kernel", name).read_text()) for name in ("pid_max", "threads-max"))
    except (OSError, ValueError):
        return 2 * MOST_PROCESSES


def _container_settings(request: job.JobRequest, name: str, identity: str, network: str) -> dict[str, Any]:
    """Return the settings that the containers of all hosts share: environment, label, mounts, network and limits.

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
        "pids_limit": max(_LEAST_PROCESSES, _read_most_processes() // 2 // request.hosts),
        # Without a limit, Docker's own copy of the log fills the disk. All lines are in the job's directory.
        "log_config": docker.types.LogConfig(type="json-file", config={"max-size": _DOCKER_LOG}),
    }


def _start_log_reader(container_id: str, host: str, view: View, log: JobLog) -> threading.Thread:
    """Start a thread that shows and keeps a host's log; return once it is attached, so that no line is lost."""
    attached = threading.Event()

    def print_lines() -> None:
        """Body of the thread."""
        try:
            api = docker_client.connect(timeout=None).api  # clients are not shared between threads
            stream = api.attach(container_id, stdout=True, stderr=True, stream=True, logs=True)
        finally:
            attached.set()
        with containers.close_at_end(stream):
            for line, is_overwritten in containers.split_pieces(stream):
                view.add(f"{host} | {line}", log.add(host, line), is_overwritten)

    thread = threading.Thread(target=print_lines, name=f"logs of {host}", daemon=True)
    thread.start()
    attached.wait()
    return thread


def _report_exit(host: str, container_id: str, arrivals: queue.SimpleQueue[Arrival]) -> None:
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


def _measure_gpus(host: str, container_id: str, meter: GpuMeter) -> None:
    """Body of a thread: run nvidia-smi in a container, which ends with it, and read its lines.

    Without nvidia-smi, or after an error of Docker, the use is unknown.
    """
    with contextlib.suppress(docker.errors.DockerException, requests.RequestException, DockerError):
        api = docker_client.connect(timeout=None).api
        process = api.exec_create(container_id, smi_command(), stderr=False)
        with containers.close_at_end(api.exec_start(process["Id"], stream=True)) as stream:
            read_lines(containers.split_lines(stream), host, meter)


def _read_usage(api: docker.APIClient, container_id: str) -> Usage | None:
    """Return the CPU time and memory of a container; None if it does not run."""
    try:
        stats = api.stats(container_id, stream=False, one_shot=True)
        cache = stats["memory_stats"].get("stats", {}).get("inactive_file", 0)
        return Usage(stats["cpu_stats"]["cpu_usage"]["total_usage"] / 1e9, stats["memory_stats"]["usage"] - cache)
    except (docker.errors.APIError, KeyError):
        return None


def stop_containers(ids: Iterable[str]) -> None:
    """Stop containers, all at the same time, and wait for them; an interrupt ends the wait."""
    threads = [threading.Thread(target=_stop_container, args=(each,), daemon=True) for each in ids]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _stop_container(container_id: str) -> None:
    """Stop a container; Docker kills it 35 s later. Errors are ignored: it is removed by force later."""
    with contextlib.suppress(docker.errors.DockerException, requests.RequestException, DockerError):
        docker_client.connect().api.stop(container_id, timeout=STOP_SECONDS + _STOP_MARGIN)
