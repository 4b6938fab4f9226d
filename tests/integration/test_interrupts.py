"""Interrupts at any moment of commands that read images, collect or push: nothing stays, and nothing is half there.

Those of builds and jobs are beside their other tests.
"""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import docker
import pytest

from shoal.builds import base_image
from shoal.matrix.project import Project
from shoal.matrix.spec import BuildSpec

from ..repeats import SEED, times
from ..tested_images import PYTORCH_CPU
from ..trusting import trust_directories
from . import test_bundle, test_push
from .test_build import SHOAL, is_interrupted, wait_until
from .test_push import Way, checkout, registry, way
from .test_run import job_objects

pytestmark = pytest.mark.xdist_group("commands")  # their images have one tag
__all__ = ["checkout", "registry", "way"]
MOMENTS = times(1, 20)


@dataclass(frozen=True)
class Command:
    """What is interrupted, where, and the directory that it fills, if it does."""

    arguments: list[str]
    directory: Path
    filled: Path

    def start(self) -> subprocess.Popen[str]:
        shutil.rmtree(self.filled, ignore_errors=True)
        if self.arguments[0] != "bundle":  # which makes it
            self.filled.mkdir()
        command = [str(SHOAL), *self.arguments]
        # Nobody reads a document on standard output, and a full pipe would stop the command.
        out, err = subprocess.DEVNULL, subprocess.PIPE
        return subprocess.Popen(command, cwd=self.directory, stdout=out, stderr=err, text=True)

    def sizes(self) -> dict[str, int]:
        """The files that are there, by path."""
        files = (path for path in self.filled.rglob("*") if path.is_file())
        return {str(path.relative_to(self.filled)): path.stat().st_size for path in files}


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    return tmp_path / "filled"


@pytest.fixture
def manifest(project: Project, filled: Path) -> Command:
    image = PYTORCH_CPU
    return Command(["inspect", image, "-o", str(filled / "page.md")], project.root, filled)


@pytest.fixture
def size(client: docker.DockerClient, matrix: BuildSpec, project: Project, filled: Path) -> Command:
    """Of a small image."""
    image = base_image.find_base(client, matrix.systems()[0])
    assert image is not None
    return Command(["size", image.reference, "--json"], project.root, filled)


@pytest.fixture
def bundle(project: Project, tmp_path: Path, filled: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    trust_directories(monkeypatch, tmp_path / "settings", tmp_path, project.root)
    test_bundle.write_project(project, tmp_path)
    return Command(["bundle", str(filled), test_bundle.TAG], tmp_path, filled)


@pytest.fixture
def push(checkout: Path, way: Way, filled: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    monkeypatch.setenv("DOCKER_CONFIG", str(checkout))
    return Command(test_push.arguments(checkout, way, test_push.PASSWORD), checkout, filled)


@pytest.mark.soak
@pytest.mark.parametrize("name", ["manifest", "size", "bundle", "push"])
def test_an_interrupt_at_any_moment_leaves_nothing(
    request: pytest.FixtureRequest,
    client: docker.DockerClient,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    command: Command = request.getfixturevalue(name)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    before = objects(client)
    started = time.monotonic()
    process = command.start()
    assert process.wait(timeout=300) == 0, process.communicate()  # to its end: how long it takes, and what it writes
    seconds, whole = time.monotonic() - started, command.sizes()
    drawn = random.Random(f"{name} {SEED}")
    codes: list[int] = []
    while len(codes) < MOMENTS or 130 not in codes:  # until one has come in the middle
        assert len(codes) < 25 * MOMENTS, codes
        share = (len(codes) % MOMENTS + drawn.random()) / MOMENTS
        started = time.monotonic()
        process = command.start()
        time.sleep(share * seconds)
        process.send_signal(signal.SIGINT)
        try:
            _, stderr = process.communicate(timeout=60)
        finally:
            process.kill()  # one that hangs must not disturb the other tests
        # An interrupt at the very end may come too late.
        assert process.returncode == 0 or is_interrupted(process.returncode, stderr), stderr
        codes.append(process.returncode)
        if process.returncode == 0:  # on a machine that had more to do before
            seconds = min(seconds, time.monotonic() - started)
        assert_gone(client, objects(client) - before, share)
        assert list(temporary.iterdir()) == [], f"moment {share:.2f}"
        assert command.sizes().items() <= whole.items(), f"moment {share:.2f}"


def assert_gone(client: docker.DockerClient, new: set[str], share: float) -> None:
    """What is new goes; with it what tests beside this one have made."""
    assert wait_until(lambda: not objects(client) & new), f"moment {share:.2f}"


def objects(client: docker.DockerClient) -> set[str]:
    """The containers and networks of such commands, and the names of the image that is pushed, if there is one."""
    repository, version = test_push.TAG.split(":")
    found = client.api.images(filters={"reference": [f"{repository}:{version}", f"*/*/{repository}:{version}"]})
    return job_objects(client, "inside-", "bundle-") | {tag for image in found for tag in image["RepoTags"]}
