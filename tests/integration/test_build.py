"""Builds on the real engine, with small images of their own so that a build takes seconds."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest

from shoal import builder, engine
from shoal.project import Project

SHOAL = Path(sys.executable).with_name("shoal")
TAG = "probe-training:1.0-cpu-py311-debian12"
SPEC = """\
mpi: []
defaults: {probe: "probe-training:1.0-cpu-py311-debian12"}
images:
  - {framework: probe, version: "1.0", device: cpu, python: py311, os: debian12, requirements: [], disk_gib: 1}
"""


@pytest.fixture(params=["1", "0"], ids=["buildkit", "classic"])
def probe(request: pytest.FixtureRequest, project: Project, tmp_path: Path) -> Iterator[Path]:
    """A project whose only image is built from the template that the test writes; for both builders."""
    os.environ["DOCKER_BUILDKIT"] = request.param
    (tmp_path / "buildspec.yml").write_text(SPEC)
    for room in ("library", "toolkit"):
        shutil.copytree(project.root / room, tmp_path / room, ignore=shutil.ignore_patterns("__pycache__"))
    locks = tmp_path / "dockerfiles" / "requirements" / TAG.replace(":", "-")
    locks.mkdir(parents=True)
    for layer in ("cuda", "framework", "mpi"):
        (locks / f"{layer}.txt").write_text("")
    # A base made before is found again; one that has to be made is made in the project's own cache.
    (tmp_path / ".cache").symlink_to(project.root / ".cache")
    yield tmp_path
    del os.environ["DOCKER_BUILDKIT"]
    client = engine.connect()
    if builder.find(client, TAG):
        client.images.remove(TAG, force=True)


def template(probe: Path, text: str) -> None:
    (probe / "dockerfiles" / "probe.j2").write_text(f"ARG BASE\nFROM ${{BASE}}\n{text}\n")


def build(probe: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([SHOAL, "build"], cwd=probe, capture_output=True, text=True, check=False)


def leftovers(client: docker.DockerClient) -> set[str]:
    return {str(container.id) for container in client.containers.list(all=True)}


def test_a_build_then_nothing_to_do_then_a_change(probe: Path, client: docker.DockerClient) -> None:
    template(probe, 'RUN echo made > /made\nCMD ["cat", "/made"]')
    first = build(probe)
    assert first.returncode == 0, first.stderr
    assert f"✓ {TAG} built" in first.stdout
    assert client.containers.run(TAG, remove=True) == b"made\n"
    assert "up to date" in build(probe).stdout
    old = str(client.images.get(TAG).id)
    template(probe, 'RUN echo new > /made\nCMD ["cat", "/made"]')
    assert f"✓ {TAG} built" in build(probe).stdout
    assert client.containers.run(TAG, remove=True) == b"new\n"
    assert old not in {image.id for image in client.images.list(all=True)}


def test_a_failing_step_is_shown_with_its_last_lines(probe: Path, client: docker.DockerClient) -> None:
    before = leftovers(client)
    template(probe, "RUN echo first\nRUN for i in $(seq 30); do echo line $i; done; exit 7")
    result = build(probe)
    assert result.returncode == 6
    assert re.search(r"step \d/\d failed: RUN for i", result.stderr)
    assert "exit 7" in result.stderr
    assert "line 30" in result.stderr
    assert "line 3\n" not in result.stderr
    assert "The whole log:" in result.stderr
    assert leftovers(client) == before


def test_an_interrupt_stops_the_build_and_leaves_nothing(probe: Path, client: docker.DockerClient) -> None:
    before = leftovers(client)
    marker = f"sleep 987.{os.getpid()}"
    template(probe, f"RUN echo waiting; {marker}")
    process = subprocess.Popen([SHOAL, "build"], cwd=probe, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert wait_until(lambda: marker in processes()), "the step never started"
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert wait_until(lambda: marker not in processes()), "the step still runs"
    assert wait_until(lambda: leftovers(client) == before)
    assert builder.find(client, TAG) is None


def processes() -> str:
    return subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout


def wait_until(condition: object, seconds: float = 60) -> bool:
    assert callable(condition)
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def test_a_change_in_the_toolkit_rebuilds_only_the_last_layer(
    project: Project, client: docker.DockerClient, pytorch: str, tmp_path: Path
) -> None:
    """The real CUDA 11 image, from a copy of the project with one changed line in the toolkit."""
    for name in ("library", "toolkit", "dockerfiles"):
        shutil.copytree(project.root / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(project.buildspec, tmp_path)
    (tmp_path / ".cache").symlink_to(project.root / ".cache")
    original = client.images.get(pytorch)
    original.tag("shoal-test:kept")
    try:
        with (tmp_path / "toolkit" / "shoal_toolkit" / "__init__.py").open("a") as file:
            file.write("# changed\n")
        result = subprocess.run([SHOAL, "build", pytorch], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
        changed = client.images.get(pytorch)
        layers, before = changed.attrs["RootFS"]["Layers"], original.attrs["RootFS"]["Layers"]
        assert layers[:-1] == before[:-1]
        assert layers[-1] != before[-1]
    finally:
        original.tag(pytorch)
        client.images.remove("shoal-test:kept")
