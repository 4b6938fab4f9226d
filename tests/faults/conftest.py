"""Faults in real containers of the small CPU image. `make faults` builds the images first.

SHOAL_TEST_TOOLKIT=<directory of the package shoal_toolkit> runs the faults with that toolkit in place of the image's.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import docker
import pytest
from testcontainers.core.network import Network

from shoal.matrix.spec import BuildSpec, ImageSpec

from ..containers import ROOT, StartHost, client, network, start_host, without_reaper
from ..tested_images import PYTORCH_CPU
from .start import StartJob
from .table import Table

__all__ = ["client", "network", "start_host"]

_PASSED = pytest.StashKey[bool]()


def pytest_configure() -> None:
    without_reaper()


@pytest.fixture(scope="session")
def chosen(matrix: BuildSpec) -> ImageSpec:
    return matrix.select(PYTORCH_CPU)


@pytest.fixture(scope="session")
def image(chosen: ImageSpec) -> str:
    return chosen.tag


@pytest.fixture
def start(
    client: docker.DockerClient, chosen: ImageSpec, network: Network, start_host: StartHost, tmp_path: Path
) -> StartJob:
    """Start a job: start(script, launcher, ...)."""
    toolkit = os.environ.get("SHOAL_TEST_TOOLKIT")
    installed = f"/opt/venv/lib/python{chosen.python_version}/site-packages/shoal_toolkit"
    volumes: dict[Path | str, str] = {Path(toolkit).resolve(): installed} if toolkit else {}
    return StartJob(client, start_host, chosen.tag, network, tmp_path, volumes)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, Any]:
    report = yield
    if call.when == "call":
        item.stash[_PASSED] = report.passed
    return report


@pytest.fixture
def table(request: pytest.FixtureRequest) -> Iterator[Table]:
    """The table of results, in the order of the tests, whichever of them run."""
    number = f"{request.function.__code__.co_firstlineno:04}-{request.session.items.index(request.node):03}"
    name = "".join(character if character.isalnum() else "-" for character in request.node.nodeid.split("::")[-1])
    made = Table(ROOT / ".cache" / "faults" / f"{request.node.path.stem}-{number}-{name}.json")
    yield made
    made.write(request.node.stash.get(_PASSED, False))
