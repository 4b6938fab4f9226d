"""Runs a job in containers: one a host, on a network of their own; everything is removed at the end, however it ends.

The trees that become /opt/ml travel over the engine's archive interface, so the engine may be on another machine;
channels are bind mounts, because data may be large: their directories must lie where the engine runs.
"""

from __future__ import annotations

import contextlib
import io
import secrets
import tarfile
import threading
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile

import docker
import docker.errors
import docker.models.containers
import docker.models.networks
import docker.types
from rich.console import Console

from shoal import engine, job
from shoal.errors import EngineError

JOB_LABEL = "shoal.job"
STOP_SECONDS = 10
"""How long hosts that are told to stop may take, in seconds."""
STRAGGLER_SECONDS = 60
"""How long the other hosts may take to end once one has ended, in seconds: all end with the job's one verdict."""


def run(image: str, request: job.JobRequest, console: Console) -> job.Outcome:
    """Run `request` in containers of `image`; stream their logs with the host in front; return the outcome.

    `request` is checked by the caller. Raises `EngineError` before anything starts. An interrupt stops the hosts,
    removes them and the network, and is raised again.
    """
    client = engine.connect()
    name = job.new_name(request)
    directory = (request.output / name).resolve()
    with _network(client, name) as network, _containers(client, image, request, name, network) as hosts:
        readers = [_stream(str(container.id), host, console) for host, container in hosts.items()]
        for container in hosts.values():
            container.start()
        exit_codes = _wait(hosts)
        for reader in readers:
            reader.join()
        trees = {host: _fetch(container, directory / host) for host, container in hosts.items()}
    return job.outcome(name, exit_codes, directory, trees)


@contextlib.contextmanager
def _network(client: docker.DockerClient, name: str) -> Iterator[docker.models.networks.Network]:
    # The packets of a new network must be no larger than the engine's default network allows.
    key = "com.docker.network.driver.mtu"
    options = client.networks.get("bridge").attrs.get("Options") or {}
    mtu = {key: options[key]} if key in options else {}
    network = client.networks.create(f"shoal-{name}", driver="bridge", options=mtu, labels={JOB_LABEL: name})
    try:
        yield network
    finally:
        network.remove()


@contextlib.contextmanager
def _containers(
    client: docker.DockerClient,
    image: str,
    request: job.JobRequest,
    name: str,
    network: docker.models.networks.Network,
) -> Iterator[dict[str, docker.models.containers.Container]]:
    """Create (not start) the hosts; stop and remove them at the end."""
    hosts: dict[str, docker.models.containers.Container] = {}
    secret = secrets.token_hex(32)
    mounts = [
        docker.types.Mount(f"/opt/ml/input/data/{channel}", str(path.resolve()), type="bind", read_only=True)
        for channel, path in request.channels.items()
    ]
    try:
        for host in request.host_names:
            hosts[host] = _create(client, image, request, name, network, host, mounts, secret)
        yield hosts
    finally:
        for container in hosts.values():
            with contextlib.suppress(docker.errors.NotFound):
                container.remove(force=True, v=True)


def _create(
    client: docker.DockerClient,
    image: str,
    request: job.JobRequest,
    name: str,
    network: docker.models.networks.Network,
    host: str,
    mounts: list[docker.types.Mount],
    secret: str,
) -> docker.models.containers.Container:
    alias = client.api.create_endpoint_config(aliases=[host])
    try:
        container = client.containers.create(
            image,
            "train",
            name=f"{name}-{host}",
            environment={**request.environment, "SHOAL_JOB_SECRET": secret, "TRAINING_JOB_NAME": name},
            labels={JOB_LABEL: name},
            mounts=mounts,
            network=network.name,
            networking_config={str(network.name): alias},
            shm_size=request.shm_size,
        )
    except docker.errors.ImageNotFound as error:
        raise EngineError(f"the engine has no image {image}. Build it: shoal build {image}") from error
    except docker.errors.APIError as error:
        raise EngineError(f"the engine cannot create {host}: {error.explanation}") from error
    with TemporaryDirectory(prefix="shoal-job-") as scratch:
        job.write_tree(Path(scratch), request, name, request.host_names, host)
        container.put_archive("/", _archive(Path(scratch)))
    return container


def _archive(root: Path) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.add(root, "opt/ml", filter=_owned_by_root)
    return buffer.getvalue()


def _owned_by_root(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = "root"
    if entry.isdir():
        entry.mode = 0o755
    return entry


def _stream(container_id: str, host: str, console: Console) -> threading.Thread:
    """Print a host's output as it comes, a line at a time, from before its first line on."""
    attached = threading.Event()

    def follow() -> None:
        try:
            api = engine.connect(timeout=None).api  # a client of its own: one a thread
            stream = api.attach(container_id, stdout=True, stderr=True, stream=True, logs=True)
        finally:
            attached.set()
        rest = b""
        for chunk in stream:
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                _print_line(console, host, line)
        if rest:
            _print_line(console, host, rest)

    thread = threading.Thread(target=follow, name=f"logs of {host}", daemon=True)
    thread.start()
    attached.wait()
    return thread


def _print_line(console: Console, host: str, line: bytes) -> None:
    text = line.decode(errors="replace").rstrip("\r")
    console.print(f"{host} | {text}", markup=False, highlight=False, soft_wrap=True)


def _wait(hosts: dict[str, docker.models.containers.Container]) -> dict[str, int]:
    """Wait until every host ended. When one has, the others get `STRAGGLER_SECONDS`, then they are stopped."""
    with futures.ThreadPoolExecutor(len(hosts)) as pool:
        waits = {host: pool.submit(_exit_code, str(container.id)) for host, container in hosts.items()}
        try:
            futures.wait(waits.values(), return_when=futures.FIRST_COMPLETED)
            _, late = futures.wait(waits.values(), timeout=STRAGGLER_SECONDS)
        except BaseException:  # an interrupt: end the hosts, or the pool would wait for them
            late = set(waits.values())
            raise
        finally:
            for host, wait in waits.items():
                if wait in late:
                    hosts[host].stop(timeout=STOP_SECONDS)
        return {host: wait.result() for host, wait in waits.items()}


def _exit_code(container_id: str) -> int:
    # A client of its own, and no limit: training is silent for as long as it likes.
    return int(engine.connect(timeout=None).api.wait(container_id)["StatusCode"])


def _fetch(container: docker.models.containers.Container, target: Path) -> Path:
    """Copy the host's model, output and checkpoints out of its container."""
    target.mkdir(parents=True)
    for part in ("model", "output", "checkpoints"):
        try:
            chunks, _ = container.get_archive(f"/opt/ml/{part}")
        except docker.errors.NotFound:
            continue
        with TemporaryFile() as buffer:
            for chunk in chunks:
                buffer.write(chunk)
            buffer.seek(0)
            with tarfile.open(fileobj=buffer) as archive:
                archive.extractall(target, filter="data")
    return target
