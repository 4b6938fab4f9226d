"""The extension recipe of AWS's guide, with its instructions and our tag in FROM: built and run."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest

from shoal.matrix.spec import BuildSpec

from ..tested_images import CLONE, PYTORCH_CPU, TENSORFLOW_CPU
from .conftest import ROOT, StartHost

pytestmark = pytest.mark.xdist_group("extend")

RECIPE = ROOT / "examples" / "extend-pytorch"
LINES = (
    'ENV PATH="/opt/ml/code:${PATH}"',
    "ENV SAGEMAKER_SUBMIT_DIRECTORY /opt/ml/code",
    "COPY cifar10.py /opt/ml/code/cifar10.py",
    "ENV SAGEMAKER_PROGRAM cifar10.py",
)


@pytest.fixture(scope="module")
def extended(client: docker.DockerClient) -> Iterator[str]:
    client.images.build(path=str(RECIPE), tag=f"extended-by-test-{CLONE}:latest", rm=True, forcerm=True)
    yield f"extended-by-test-{CLONE}:latest"
    client.images.remove(f"extended-by-test-{CLONE}:latest", force=True)


def test_the_recipe_is_the_guides(pytorch: str) -> None:
    """But for comments, the lines of AWS's guide to extending a prebuilt container."""
    lines = (RECIPE / "Dockerfile").read_text().splitlines()
    assert [line for line in lines if line and not line.startswith("#")] == [f"FROM {pytorch}", *LINES]


@pytest.mark.parametrize("name", [PYTORCH_CPU, TENSORFLOW_CPU])
def test_a_new_project_builds_trains_and_passes_its_test(
    client: docker.DockerClient, matrix: BuildSpec, tmp_path: Path, name: str
) -> None:
    project = tmp_path / f"new-by-test-{CLONE}"
    shoal = Path(sys.executable).with_name("shoal")
    subprocess.run([shoal, "new", project, "--image", matrix.select(name).tag], cwd=ROOT, check=True)
    try:
        check(sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "test_train.py", cwd=project)
        if name == TENSORFLOW_CPU:  # the other one trains on two hosts in docs/start.md, by test_pages.py
            hosts = ("--hosts", "2", "--procs-per-host", "1")
            said = check(shoal, "run", f"new-by-test-{CLONE}", *hosts, "--", "--epochs", "3", cwd=project)
            accuracy = re.search(r"test accuracy (0\.\d+)", said)
            assert accuracy is not None, said
            assert float(accuracy[1]) > 0.8, said
    finally:
        client.images.remove(f"new-by-test-{CLONE}:latest", force=True)


def check(*command: str | Path, cwd: Path) -> str:
    """Run a command that must succeed; what it printed."""
    ended = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_shoal_run_trains_the_script_it_was_given(extended: str, tmp_path: Path) -> None:
    """The image's own ENV SAGEMAKER_PROGRAM names another."""
    source = tmp_path / "code"
    source.mkdir()
    (source / "mine.py").write_text("print('this is mine')\n")
    options: list[str | Path] = ["--source", source, "--entry-point", "mine.py", "--output", tmp_path / "jobs"]
    shoal = Path(sys.executable).with_name("shoal")
    result = subprocess.run([shoal, "run", extended, *options], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "this is mine" in result.stdout


def test_the_extended_image_trains(start_host: StartHost, extended: str) -> None:
    ended = start_host(extended, ["train", "--epochs", "1"]).wait()
    assert ended.code == 0, ended.output
    assert "accuracy" in ended.output
