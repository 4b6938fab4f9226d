"""What the tests with the built images share. `make test-integration` builds the images first."""

from __future__ import annotations

import os
import shutil
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest

from shoal.builds.plan import plan_builds
from shoal.matrix.project import Project
from shoal.matrix.spec import BuildSpec

from ..containers import ROOT, Ended, Host, StartHost, client, network, start_host, without_reaper, write_tree
from .image_containers import ask_running_containers, container, image, image_containers

__all__ = [
    "ROOT",
    "Ended",
    "Host",
    "StartHost",
    "ask_running_containers",
    "client",
    "container",
    "image",
    "image_containers",
    "network",
    "start_host",
    "write_tree",
]


def pytest_configure() -> None:
    without_reaper()


@pytest.fixture(scope="session", autouse=True)
def _note_images_of_others(project: Project, matrix: BuildSpec) -> None:
    """Warns of images that another clone or commit has made: all clones share the tags of the matrix."""
    plans = plan_builds(project, matrix, matrix.images)
    if others := [each.image.tag for each in plans if each.decision.state == "rebuilt"]:
        warnings.warn(f"not images of this checkout: {', '.join(others)}. Fix: make images", stacklevel=1)


@pytest.fixture(scope="session")
def pytorch(matrix: BuildSpec) -> str:
    """The CUDA 11 PyTorch image."""
    return matrix.select("pytorch").tag


@pytest.fixture(scope="session")
def compose() -> str:
    """The command of compose, Debian's, which is installed if it is missing."""
    if not shutil.which("docker-compose"):
        install = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", "docker-compose"]
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        subprocess.run(install, env=environment, check=True, capture_output=True, timeout=300)
    return "docker-compose"


@pytest.fixture
def left_by_compose(client: docker.DockerClient, tmp_path: Path) -> Iterator[None]:
    """Removes the containers and the network that the SDKs leave."""
    yield
    for left in client.containers.list(all=True, filters={"label": "com.docker.compose.project"}):
        if left.labels.get("com.docker.compose.project.working_dir", "").startswith(str(tmp_path)):
            left.remove(force=True)
    for made in client.networks.list(names=["sagemaker-local"]):
        made.remove()
