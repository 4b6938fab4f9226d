"""The extension recipe of AWS's guide, word for word, with our tag in FROM: built and run."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest

from .conftest import ROOT, StartHost

RECIPE = ROOT / "examples" / "extend-pytorch"
LINES = (
    'ENV PATH="/opt/ml/code:${PATH}"',
    "ENV SAGEMAKER_SUBMIT_DIRECTORY /opt/ml/code",
    "COPY cifar10.py /opt/ml/code/cifar10.py",
    "ENV SAGEMAKER_PROGRAM cifar10.py",
)


@pytest.fixture
def extended(client: docker.DockerClient) -> Iterator[str]:
    client.images.build(path=str(RECIPE), tag="extended-by-test:latest", rm=True, forcerm=True)
    yield "extended-by-test:latest"
    client.images.remove("extended-by-test:latest", force=True)


def test_the_recipe_is_the_guides(pytorch: str) -> None:
    lines = (RECIPE / "Dockerfile").read_text().splitlines()
    instructions = [line for line in lines if re.match(r"[A-Z]+ ", line)]
    assert instructions == [f"FROM {pytorch}", *LINES]


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
    ended = start_host(extended, "train").wait()
    assert ended.code == 0, ended.output
    assert "accuracy" in ended.output
