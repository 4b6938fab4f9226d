"""What the tests with the built images share. `make test-integration` builds the images first."""

from __future__ import annotations

import pytest

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


@pytest.fixture(scope="session")
def pytorch(matrix: BuildSpec) -> str:
    """The CUDA 11 PyTorch image."""
    return matrix.select("pytorch").tag
