"""Runs a job through a toolkit, in containers as SageMaker starts them, and reads the results."""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import docker
import requests
from docker.models.containers import Container

from shoal import docker_client

from .layout import RECORD, Tree


class Process(NamedTuple):
    """A script that wrote down how it was started. `parents` are the command lines above it, the nearest first."""

    argv: list[str]
    cwd: str
    interpreter: str
    environ: dict[str, str]
    parents: list[list[str]]


class HostRun(NamedTuple):
    """The results of a host's container. `code` is None if it had to be killed; `stamped`: the log with times."""

    code: int | None
    seconds: float
    log: str
    stamped: str
    files: dict[str, bytes]
    scripts: list[Process]

    def printed_at(self, line: str) -> float:
        """Return when a line came, in seconds."""
        return _moment(next(stamped for stamped in self.stamped.splitlines() if stamped.endswith(f" {line}")))

    def text(self, name: str) -> str:
        """Returns a file below /opt/ml; empty if there is none."""
        return self.files.get(name, b"").decode(errors="replace")


Run = Mapping[str, HostRun]


def run(image: str, tree: Tree, directory: Path) -> Run:
    """Run a job on all its hosts, in `directory`, until all have ended or its time is over."""
    client = docker_client.connect()  # one a thread
    with ExitStack() as undo:
        net = undo.enter_context(_network(client)) if len(tree.hosts) > 1 else None
        hosts = [host for host in tree.hosts if host not in tree.absent]
        containers = {host: _create(client, image, tree, host, directory / host, net, undo) for host in hosts}
        for container in containers.values():
            container.start()
        deadline = time.monotonic() + tree.limit_s
        return {host: _ended(container, deadline, directory / host) for host, container in containers.items()}


def _create(client: Any, image: str, tree: Tree, host: str, base: Path, net: Any, undo: ExitStack) -> Container:
    tree.write(base / "ml", host)
    for name in ("record", "recorder"):
        (base / name).mkdir()
    (base / "recorder" / "record.py").write_text(RECORD)
    api = client.api
    # The host's name is an alias on the network and no more, as on SageMaker: gethostname() says something else.
    alias = {net.name: api.create_endpoint_config(aliases=[host])} if net else None
    made = api.create_container(
        image,
        hostname=f"instance-{tree.hosts.index(host) + 1}",
        environment=tree.variables,
        host_config=api.create_host_config(
            binds=[f"{base / 'ml'}:/opt/ml", f"{base / 'record'}:/record", f"{base / 'recorder'}:/recorder:ro"],
            network_mode=net.name if net else None,
            extra_hosts=None if net else {host: "127.0.0.1"},
            nano_cpus=int(tree.cpus * 1e9),
            mem_limit=f"{tree.memory_mib}m",
            devices=[f"/dev/null:/dev/{name}:r" for name in tree.devices],
            init=False,
        ),
        networking_config=api.create_networking_config(alias) if alias else None,
    )
    container: Container = client.containers.get(made["Id"])
    undo.callback(container.remove, force=True)
    return container


@contextmanager
def _network(client: docker.DockerClient) -> Iterator[Any]:
    """A network of its own, gone afterwards; without the world, unknown names are unknown at once."""
    made = client.networks.create(f"shoal-conformance-{uuid.uuid4().hex[:12]}", internal=True)
    try:
        yield made
    finally:
        made.remove()


def _ended(container: Container, deadline: float, base: Path) -> HostRun:
    code: int | None
    try:
        code = int(container.wait(timeout=max(1, deadline - time.monotonic()))["StatusCode"])
    except requests.RequestException:
        container.kill()
        container.wait()
        code = None
    container.reload()
    state = container.attrs["State"]
    return HostRun(
        code=code,
        seconds=_moment(state["FinishedAt"]) - _moment(state["StartedAt"]),
        log=container.logs().decode(errors="replace"),
        stamped=container.logs(timestamps=True).decode(errors="replace"),
        files=dict(_files(base / "ml")),
        scripts=[Process(**json.loads(path.read_text())) for path in sorted((base / "record").glob("*.json"))],
    )


def _moment(text: str) -> float:
    """Reads Docker's time stamp. It has nanoseconds; Python reads microseconds."""
    return datetime.fromisoformat(text[:26].rstrip("Z")).timestamp()


def _files(base: Path) -> Iterator[tuple[str, bytes]]:
    for directory, names, files in os.walk(base):
        if Path(directory) == base:
            names.remove("input")
        names[:] = [name for name in names if name != "__pycache__"]
        for name in files:
            path = Path(directory, name)
            yield str(path.relative_to(base)), path.read_bytes()
