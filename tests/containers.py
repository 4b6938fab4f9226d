"""Real training containers, through testcontainers: started, waited for, removed; their /opt/ml laid out by hand.

For the tests with real containers; a conftest imports the fixtures that its folder needs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker
import docker.errors
import pytest
import requests
from docker.models.containers import Container
from testcontainers.core.config import testcontainers_config
from testcontainers.core.container import DockerContainer
from testcontainers.core.network import Network

from shoal import docker_client

ROOT = Path(__file__).resolve().parents[1]


def without_reaper() -> None:
    """Turn testcontainers' reaper off where its image cannot be pulled; the fixtures remove what they start."""
    client = docker_client.connect()
    image = testcontainers_config.ryuk_image
    try:
        client.images.get(image)
    except docker.errors.ImageNotFound:
        try:
            client.images.pull(image)
        except docker.errors.APIError:
            testcontainers_config.ryuk_disabled = True


@pytest.fixture(scope="session")
def client() -> docker.DockerClient:
    return docker_client.connect()


@dataclass(frozen=True)
class Ended:
    """A container's end: exit code and everything it printed."""

    code: int
    output: str


class Host:
    """One training container; its /opt/ml is the directory `tree` where one is given."""

    def __init__(self, container: DockerContainer, tree: Path | None) -> None:
        self.container, self.tree = container, tree

    @property
    def engines(self) -> Container:
        """The container as the engine's own client knows it."""
        container: Container = self.container.get_wrapped_container()
        return container

    def wait(self, timeout: int = 240) -> Ended:
        """Wait for its end; fails with what it runs and has printed where that takes more than `timeout` seconds."""
        try:
            code = self.engines.wait(timeout=timeout)["StatusCode"]
        except (requests.ConnectionError, requests.ReadTimeout):
            self.engines.reload()
            pytest.fail(f"{self.engines.name} has not ended within {timeout} s: {self._doing()}\n{self._printed()}")
        return Ended(int(code), self._printed())

    def _printed(self) -> str:
        return self.engines.logs().decode(errors="replace")

    def _doing(self) -> str:
        """Its state and, where it runs, its processes."""
        try:
            processes = self.engines.top()["Processes"]
        except docker.errors.APIError:  # it has ended meanwhile
            processes = []
        return "\n".join([self.engines.status, *(" ".join(process) for process in processes)])

    def path(self, name: str) -> Path:
        assert self.tree is not None
        return self.tree / name


StartHost = Callable[..., Host]


def _mount(path: Path | str, target: str) -> tuple[str, str, str]:
    """Returns the arguments of a mount; the target is a directory of the container, or `directory:ro`."""
    directory, _, mode = target.partition(":")
    return str(path), directory, mode or "rw"


@pytest.fixture
def start_host() -> Iterator[StartHost]:
    """Start training containers; they are removed at the end."""
    started: list[DockerContainer] = []

    def start(
        image: str,
        command: str | list[str] | None = "train",
        *,
        tree: Path | None = None,
        mode: str = "rw",
        volumes: Mapping[Path | str, str] | None = None,
        env: Mapping[str, str] | None = None,
        network: Network | None = None,
        alias: str = "",
        tmpfs: str = "",
        **options: Any,
    ) -> Host:
        container = DockerContainer(image, **options)
        if command is not None:
            container.with_command(command)
        mounts = [(str(tree), "/opt/ml", mode)] if tree is not None else []
        for mount in (*mounts, *(_mount(path, target) for path, target in (volumes or {}).items())):
            container.with_volume_mapping(*mount)
        for name, value in (env or {}).items():
            container.with_env(name, value)
        if network is not None:
            container.with_network(network).with_network_aliases(alias)
        if tmpfs:
            container.with_tmpfs_mount(tmpfs)
        started.append(container)
        container.start()
        return Host(container, tree)

    yield start
    for container in started:
        container.stop()


@pytest.fixture(scope="session")
def network() -> Iterator[Network]:
    """One network for all tests of a process, whose containers are removed after each: it takes a second to make."""
    with Network() as made:
        yield made


def write_tree(
    root: Path,
    script: str,
    hyperparameters: dict[str, Any] | None = None,
    hosts: tuple[str, ...] = ("algo-1",),
    current_host: str = "algo-1",
) -> Path:
    """Lay out /opt/ml by hand (not by shoal's own writer): the script as train.py, SDK-encoded hyperparameters."""
    (root / "code").mkdir(parents=True)
    (root / "code" / "train.py").write_text(script)
    config = root / "input" / "config"
    config.mkdir(parents=True)
    for directory in ("model", "output/data"):
        (root / directory).mkdir(parents=True)
    values = {
        "sagemaker_program": "train.py",
        "sagemaker_submit_directory": "/opt/ml/code",
        **(hyperparameters or {}),
    }
    encoded = {key: json.dumps(value) for key, value in values.items()}
    (config / "hyperparameters.json").write_text(json.dumps(encoded))
    resources = {"current_host": current_host, "hosts": list(hosts), "network_interface_name": "eth0"}
    (config / "resourceconfig.json").write_text(json.dumps(resources))
    return root
