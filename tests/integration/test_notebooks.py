"""The notebooks of examples/notebooks, with the real SDK in local mode: their jobs and endpoints are containers here.

The SDK (360 MB) is installed once, in about a minute. What it sends to SageMaker is in test_sagemaker_requests.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docker
import pytest

from ..launching import find_port
from ..tested_images import CLONE, PYTORCH_CPU
from .conftest import ROOT
from .sagemaker_requests import make_environment, sdk_variables
from .test_recipes import BETWEEN, built, write_context

NOTEBOOKS = ROOT / "examples" / "notebooks"
RUN = Path(__file__).with_name("run_notebook.py")
METRICS = r"'test accuracy (0\.\d+) with world size (\d)'"
OWN, SERVING = (f"notebook-{name}-by-test-{CLONE}:latest" for name in ("own", "serve"))
pytestmark = [
    pytest.mark.xdist_group("sagemaker-local"),  # the SDKs' network has one name
    pytest.mark.long,
    pytest.mark.usefixtures("compose", "left_by_compose"),
]


def run(tmp_path: Path, name: str, **settings: str) -> str:
    """Runs a notebook as a user without an account of AWS does. Returns all that its cells print."""
    variables = sdk_variables(HOME=str(tmp_path), TMPDIR=str(tmp_path))
    names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION")
    variables = {key: value for key, value in variables.items() if key not in names}
    command: list[str | Path] = [make_environment("2"), RUN, NOTEBOOKS / f"{name}.ipynb"]
    command += [f"{key}={value}" for key, value in settings.items()]
    ended = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=500, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


def find(pattern: str, output: str) -> re.Match[str]:
    found = re.search(pattern, output)
    assert found, output
    return found


@pytest.fixture
def own_images(client: docker.DockerClient) -> Iterator[None]:
    yield
    for tag in (OWN, SERVING):
        if client.images.list(tag):
            client.images.remove(tag, force=True)


@pytest.mark.parametrize(
    ("name", "world_size", "least"),
    [("data_parallel_pytorch", 2, 0.9), ("data_parallel_tensorflow", 2, 0.9), ("model_parallel", 2, 0.8)],
)
def test_a_notebook_trains_the_digits(tmp_path: Path, name: str, world_size: int, least: float) -> None:
    accuracy, ranks = find(METRICS, run(tmp_path, name)).groups()
    assert int(ranks) == world_size
    assert float(accuracy) > least


def test_a_notebook_fine_tunes_a_model_that_then_answers(tmp_path: Path) -> None:
    output = run(tmp_path, "hugging_face")
    assert float(find(r"test accuracy ([01]\.\d+), world size 2", output)[1]) > 0.9
    assert "[{'label': 'LABEL_1', 'score':" in output  # lovely


@pytest.mark.usefixtures("own_images")
def test_a_notebook_builds_an_image_and_trains_in_it(tmp_path: Path) -> None:
    output = run(tmp_path, "own_container", image=OWN)
    assert float(find(r"epoch 3/3 loss \S+ test accuracy ([01]\.\d+)", output)[1]) > 0.9
    assert "['model.pt']" in output


@pytest.mark.usefixtures("own_images")
def test_a_notebook_deploys_a_model_that_answers(tmp_path: Path) -> None:
    (tmp_path / "context").mkdir()
    directory = write_context(tmp_path / "context", BETWEEN)
    with built(f"notebook-between-by-test-{CLONE}:latest", directory, BASE=PYTORCH_CPU) as base:
        output = run(tmp_path, "deploy", base=base, image=SERVING, port=str(find_port()))
    assert "'The model reads 7'" in output


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_begins_with_its_needs_and_has_no_output(path: Path) -> None:
    cells: list[dict[str, Any]] = json.loads(path.read_text())["cells"]
    first = "".join(cells[0]["source"])
    assert cells[0]["cell_type"] == "markdown"
    assert "| needs | " in first
    assert "| time | " in first
    assert [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")] == []
