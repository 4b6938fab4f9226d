"""The containers of a job: one for each host, on a network of their own, with one volume for checkpoints.

The trees that become /opt/ml are copied over Docker's API, so Docker may run on another machine. Channels are mounted,
as data may be large: their directories must exist on Docker's machine.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import queue
import tarfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import IO, Any

import docker
import docker.errors
import docker.types
import urllib3.exceptions
from docker.models.containers import Container
from rich.console import Console

from shoal import docker_client
from shoal.console import print_line
from shoal.docker_client import archive, containers, images
from shoal.docker_client.archive import open_stream
from shoal.docker_client.images import ROOT, Owner, find_owner
from shoal.errors import ShoalError, UsageError
from shoal.jobs import checkpoints, gpus, job, locked_image, results, run, variables
from shoal.jobs.hosts.docker_objects import (
    SECRET_PATH,
    container_settings,
    create_network,
    measure_gpus,
    read_usage,
    remove_earlier,
    report_exit,
    start_log_reader,
    stop_containers,
    volume_name,
)
from shoal.jobs.job_log import JobLog
from shoal.jobs.run import Arrival
from shoal.jobs.store import OpenJob
from shoal.jobs.usage import GpuMeter, Usage
from shoal.jobs.view import View
from shoal.limits import GIB

_LIST_SECONDS = 10
_SHOWN_OMISSIONS = 20  # of a directory
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
    image: str = ""
    """The image with the packages of the job's lock file; empty: the request's."""
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
    lost_files: tuple[str, ...] = ()
    """Files that a script which has succeeded has saved beside the code, if it has saved no model."""

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
        """Creates the container of a host with its /opt/ml, its GPUs and the job's secret, and removes an earlier one.

        `environment`: more variables than the job's own.
        """
        settings = container_settings(self.request, self.name, self.identity, self.network)
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
            image = self.image or self.request.image
            container = containers.create_container(self.client, image, command, {**settings, **own})
            self.by_name[host] = container
        self.tree.seek(0)
        container.put_archive("/", self.tree)
        config = job.encode_resource_config(self.request.host_names, host)
        container.put_archive("/", archive.pack_file("opt/ml/" + job.RESOURCE_CONFIG, config, 0o644, self.owner))
        files = {f"{variables.SECRETS[1:]}/{name}": content for name, content in self.secrets.items()}
        if self.secret:
            files[SECRET_PATH] = self.secret.encode()
        for path, content in files.items():
            # An image may have a link to the results there.
            packed = archive.pack_file(path, content, 0o400, self.owner, replaces_links=True)
            container.put_archive("/", packed)

    def start(self, *hosts: str) -> None:
        """Starts containers, and threads that print their logs and put their exits into `arrivals`."""
        with self.follow(hosts):
            self.start_containers(hosts)

    @contextlib.contextmanager
    def follow(self, hosts: Iterable[str]) -> Iterator[None]:
        """Starts threads that print logs. After the body, starts others that wait for exits and read the GPUs' use."""
        for host in hosts:
            self.readers.append(start_log_reader(str(self.by_name[host].id), host, self.view, self.log))
        yield
        for host in hosts:
            arguments = (host, str(self.by_name[host].id), self.arrivals)
            threading.Thread(target=report_exit, args=arguments, daemon=True).start()
            if self.devices[host]:
                measured = (host, str(self.by_name[host].id), self.meter)
                threading.Thread(target=measure_gpus, args=measured, daemon=True).start()

    def start_containers(self, hosts: Iterable[str]) -> None:
        """Starts containers, and no threads. Raises `DockerError` with an explanation if Docker refuses."""
        for host in hosts:
            try:
                self.by_name[host].start()
            except docker.errors.APIError as error:
                raise images.explain_start(self.request.image, error, self.request.environment) from error

    def stop(self, hosts: Iterable[str]) -> None:
        """Stops containers, all at the same time, and waits for them; an interrupt ends the wait."""
        stop_containers(str(self.by_name[host].id) for host in hosts)

    def join_readers(self) -> None:
        """Waits until the logs of hosts, which have ended, are shown and kept."""
        for reader in self.readers:
            reader.join()

    def kill(self) -> None:
        """Kills all containers that still run."""
        for container in self.by_name.values():
            with contextlib.suppress(docker.errors.APIError):  # it has ended
                container.kill()

    def fill(self, directory: checkpoints.LockedCheckpoints) -> None:
        """Copies checkpoints into the volume."""
        if directory.has_files():
            with TemporaryFile(dir=directory.path.parent) as packed:
                directory.pack(_CHECKPOINTS, packed, self.owner)
                self.by_name[self.first].put_archive("/", packed)

    def end_interrupted(self, opened: OpenJob) -> None:
        """Kills the hosts that a second interrupt did not wait for, and collects the files of their scripts.

        An impatient user interrupts three times. The third waits, and ends this if copying the files takes long.
        """
        with containers.delay_interrupts():
            self.kill()
            self.collect(opened)
            with contextlib.suppress(OSError):  # the terminal is gone
                print_line(f"interrupted; files of the hosts are in {opened.directory}", self.console)

    def collect(self, opened: OpenJob) -> dict[str, Path]:
        """Copies checkpoints, models and output from the hosts, which have ended. Returns the tree of each host.

        If the checkpoints cannot be copied, that is printed, the earlier ones stay, and so does the volume with the
        newest.
        """
        if self.network:  # nothing of the job is in it, and Docker needs a fifth of a second
            self._remove_early(opened, _remove_network, self.network)
        try:
            self._collect_checkpoints(opened.checkpoints)
            opened.update(uncollected=False)
        except NOT_COLLECTED as error:  # the job has its result, and the volume stays
            self._print_skipped(f"the checkpoints were not collected: {error}")
        finally:
            trees = {host: self.fetch_results(host, opened.directory / host) for host in self.by_name}
        return trees

    def _collect_checkpoints(self, directory: checkpoints.LockedCheckpoints) -> None:
        """Replaces a directory's content by the volume's. An interrupt waits for at most `containers.HANGS`."""
        with (
            containers.delay_interrupts(),
            directory.replace() as scratch,
            containers.read_archive(self._find_container(), f"/{_CHECKPOINTS}") as file,
        ):
            self._print_omissions("", archive.unpack_safely(file, scratch, _ML))

    def begin_removal(self, opened: OpenJob, has_succeeded: bool) -> None:
        """Begins to remove the containers in a thread, if the checkpoints are collected. Before, lists lost files."""
        trees = {host: opened.directory / host for host in self.by_name}
        self.lost_files = _list_lost_files(self, trees) if has_succeeded else ()
        if not opened.record.uncollected:
            self._remove_early(opened, _remove_objects, self.identity)

    def _remove_early(self, opened: OpenJob, remove: Callable[[str], None], name: str) -> None:
        """Removes objects in a thread, which has ended when the job is closed."""
        thread = threading.Thread(target=remove, args=(name,), daemon=True)
        thread.start()
        opened.at_end.callback(_await_removal, thread)

    def _find_container(self) -> Container:
        """Returns a container that still exists, or the first one. All of them have the volume."""
        filters = {"label": f"{containers.JOB_LABEL}={self.identity}"}
        present = {each["Id"] for each in self.client.api.containers(all=True, filters=filters)}
        found = (container for container in self.by_name.values() if container.id in present)
        return next(found, self.by_name[self.first])

    def fetch_results(self, host: str, target: Path) -> Path:
        """Copies model and output of a host to `target`, which is created, and returns it.

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
        """Returns the files that the script has written beside the code on the first host, relative to the code.

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
        """Returns the CPU time, memory and GPUs of the containers that run. Only one thread may call this."""
        found = {host: read_usage(self._usage_client.api, number) for host, number in self.ids.items()}
        return {host: replace(usage, gpu=self.meter.read(host)) for host, usage in found.items() if usage}

    @functools.cached_property
    def _usage_client(self) -> docker.DockerClient:
        return docker_client.connect()  # clients are not shared between threads

    def _print_omissions(self, start: str, omissions: Iterable[str]) -> None:
        """Prints the first files that are not copied, and the number of the others: a script can make millions."""
        count = 0
        for count, omission in enumerate(omissions, 1):
            if count <= _SHOWN_OMISSIONS:
                self._print_skipped(f"{start}not collected: {omission}")
        if count > _SHOWN_OMISSIONS:
            self._print_skipped(f"{start}not collected: {count - _SHOWN_OMISSIONS} more")

    def _print_skipped(self, text: str) -> None:
        print_line(text, self.console)

    def has_result(self, host: str) -> bool:
        """Returns whether `train` has written a result on a host."""
        return any(self._read_file(host, f"output/{name}") is not None for name in ("success", "failure"))

    def read_restarts(self, host: str) -> list[dict[str, Any]]:
        """Returns the restarts that `train` has listed in job.json on a host; none if it has not."""
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
    environment: Mapping[str, str] | None = None,
) -> Iterator[DockerHosts]:
    """Creates the network, the volume and the containers of a job, and yields them. Starts nothing.

    The caller removes all of them at the end, by their label `identity`, by default the job's name. If the volume
    exists already, it is used. `environment`: variables of these containers, and not of later ones in their place.
    """
    identity = identity or name
    say = functools.partial(print_line, on=view.console)
    devices = gpus.divide_gpus(client, request.image, request.gpus, request.host_names, say)
    network = create_network(client, identity)
    with containers.delay_interrupts():
        client.volumes.create(volume_name(identity), labels={containers.JOB_LABEL: identity})
    owner = find_owner(client, request.image, identity)
    image = locked_image.provide_image(client, request, identity, say)
    with TemporaryFile() as tree:
        pack_job(request, name, owner, tree)
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
            image=image,
            owner=owner,
            cpus=job.share_cpus(request, client.info()["NCPU"]) if request.hosts > 1 else {},
        )
        for host in request.host_names:
            hosts.create(host, environment)
        yield hosts


def pack_job(request: job.JobRequest, name: str, owner: Owner, out: IO[bytes]) -> None:
    """Writes the archive with the files that all hosts of a job share."""
    with TemporaryDirectory(prefix="shoal-job-") as scratch:
        job.write_tree(Path(scratch), request, name, mode=0o644)  # also for a script that changes its user
        archive.pack_tree(Path(scratch), "opt/ml", out, owner)


_NEVER_RAN = 1  # the exit code of `train` for a job that could not run


def run_job_in_docker(opened: OpenJob, view: View) -> job.FinishedJob:
    """Runs a job in containers to its end, and shows the hosts' logs with the host's name before each line.

    The files of each host are copied to the job's directory, and its checkpoints to their own directory, also if the
    job fails. An interrupt stops the hosts, removes them, the network and the volume, and is raised again. A second
    interrupt does not wait for the script.

    Args:
        opened: The job, which the caller has checked.
        view: Shows logs, and has the console for messages.

    Returns:
        The result. A job that failed raises nothing.

    Raises:
        DockerError: If Docker does not answer, refuses, or lacks the image.
        UsageError: If the source cannot be copied, there are fewer GPUs than hosts, or the job runs already.
    """
    with open_hosts(opened, view) as hosts:
        return run_on_hosts(opened, hosts)


@contextlib.contextmanager
def open_hosts(opened: OpenJob, view: View, environment: Mapping[str, str] | None = None) -> Iterator[DockerHosts]:
    """Creates the objects of a job in Docker. They are removed when the job is closed (`OpenJob.at_end`).

    Args:
        opened: The job, which the caller has checked.
        view: Shows logs, and has the console for messages.
        environment: More variables of the first containers.
    """
    client, request = docker_client.connect(), opened.record.request
    is_filled = opened.resumed and _keep_volume(client, opened, view.console)
    opened.at_end.callback(_remove_all, client, opened, view.console)
    with create_hosts(client, request, opened.name, view, opened.log, opened.identity, environment) as hosts:
        if not is_filled:
            hosts.fill(opened.checkpoints)
        yield hosts


def run_on_hosts(opened: OpenJob, hosts: DockerHosts, start: Callable[[], None] | None = None) -> job.FinishedJob:
    """Runs a job on its hosts, as `run_job_in_docker` does.

    Args:
        opened: The job.
        hosts: Its hosts.
        start: Starts them; None: `DockerHosts.start` does.
    """
    result = run.run_job(opened, hosts, start)
    trees = {host: opened.directory / host for host in hosts.by_name}
    return replace(check_train(hosts.client, hosts.request, trees, result), lost_files=hosts.lost_files)


def check_train(
    client: docker.DockerClient, request: job.JobRequest, trees: Mapping[str, Path], result: job.FinishedJob
) -> job.FinishedJob:
    """Returns the result with a message if the job succeeded and `train` never ran. If ranks were asked for, it failed.

    `train` writes files into output/. Nothing is known of a host with an output that could not be collected.
    """
    outputs = [tree / "output" for tree in trees.values()]
    if result.exit_code or not all(output.is_dir() for output in outputs):
        return result
    if any(os.path.lexists(output / name) for output in outputs for name in ("success", "failure", "job.json")):
        return result
    image = images.find_image(client, request.image)
    entry = images.read_config(image).get("Entrypoint") if image else None
    other = f"its ENTRYPOINT {json.dumps(entry)}" if entry else "another program `train`"
    text = f"Shoal's `train` never ran in {request.image}, which started {other}"
    if request.asks_for_ranks:
        text += ". So the ranks that you asked for did not start: each host ran the program once"
        result = replace(result, exit_code=_NEVER_RAN)
    cause = "ENTRYPOINT" if entry else "that program"
    fix = f"Fix: remove {cause} from the Dockerfile, and add ENV SAGEMAKER_PROGRAM=train.py with your script"
    first = next(iter(trees))
    earlier = result.messages.get(first)
    return replace(result, messages={**result.messages, first: "\n".join(filter(None, (earlier, f"{text}. {fix}")))})


def _list_lost_files(hosts: DockerHosts, trees: Mapping[str, Path]) -> tuple[str, ...]:
    """Returns the files that a script which has succeeded has saved beside the code, if it has saved no model."""
    if not any(path.is_file() for tree in trees.values() for path in tree.glob("model/**/*")):
        with contextlib.suppress(*NOT_COLLECTED):  # the container is gone: the job has its result all the same
            return tuple(hosts.list_lost_files())
    return ()


def _keep_volume(client: docker.DockerClient, opened: OpenJob, console: Console) -> bool:
    """Removes an earlier command's objects from Docker. Returns whether its volume has the newest checkpoints."""
    is_expected = opened.record.uncollected
    if remove_earlier(client, opened.name, opened.identity, keep_volume=is_expected):
        return True
    if is_expected:
        opened.update(uncollected=False)
        lost = f"the Docker volume {volume_name(opened.identity)} with the newest checkpoints is gone"
        if not opened.checkpoints.has_files():
            raise UsageError(f"--resume {opened.name}: {lost}. Fix: start the job again without --resume")
        print_line(f"{lost}; continuing from {opened.checkpoints.path}", console)
    return False


def _remove_objects(identity: str) -> None:
    """Body of a thread: remove the objects of a job. After an error, `_remove_all` tries again."""
    with contextlib.suppress(*NOT_COLLECTED):
        containers.remove_objects(docker_client.connect(), identity, volumes=True)


def _remove_network(name: str) -> None:
    """Body of a thread: remove a network, which no container uses after its end."""
    with contextlib.suppress(*NOT_COLLECTED):
        docker_client.connect().networks.get(name).remove()


def _await_removal(thread: threading.Thread) -> None:
    with containers.delay_interrupts():
        thread.join()


def _remove_all(client: docker.DockerClient, opened: OpenJob, console: Console) -> None:
    """Removes the job's objects from Docker. A volume with checkpoints that could not be collected stays."""
    with containers.delay_interrupts():
        containers.remove_objects(client, opened.identity, volumes=not opened.record.uncollected)
    if opened.record.uncollected:
        volume = volume_name(opened.identity)
        print_line(
            f"the newest checkpoints were not collected. They are in the Docker volume {volume}. Fix: if a disk"
            f" is full, make room for them. Then continue from them with: shoal run --resume {opened.name}",
            console,
        )
