"""The wheels of `make wheels` on Python 3.13: in a container, because the tests run on 3.11."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import docker
import pytest

from shoal.matrix.spec import BuildSpec
from shoal.sources import lock

from ..tested_images import PYTORCH_LATEST
from .conftest import ROOT

pytestmark = pytest.mark.xdist_group("wheels")  # with tests/images/test_wheels.py: they are built once
PYTHON = "3.13"
# PATH has the fresh environment and Debian's Python, not the image's packages.
SCRIPT = """
set -e
python3 -m venv --without-pip /tmp/venv
/opt/venv/bin/pip --python /tmp/venv/bin/python install -q --no-compile --no-index --find-links /wheels /dist/*.whl
export PATH=/tmp/venv/bin:/usr/bin:/bin
mkdir /tmp/empty && cd /tmp/empty
python --version
shoal --version
shoal list
shoal init mine
(cd mine && shoal render --check)
mkdir code && echo "import sys; print('hello from', sys.prefix, *sys.argv[1:])" > code/hello.py
shoal run pytorch --source code --entry-point hello.py --engine none --hyperparameter epochs=3
"""


def test_shoal_is_used_on_python_3_13(
    client: docker.DockerClient, matrix: BuildSpec, dist: Path, tmp_path: Path
) -> None:
    image = matrix.select(PYTORCH_LATEST)
    assert image.python_version == PYTHON
    wheels = [str(path) for path in dist.glob("*.whl")]
    download = [sys.executable, "-m", "pip", "download", "--quiet", f"--dest={tmp_path}", *lock.target_options(PYTHON)]
    download.append(f"--constraint={ROOT / 'requirements' / 'dev.txt'}")
    subprocess.run([*download, *wheels], cwd=tmp_path, check=True)
    output = client.containers.run(
        image.tag,
        ["sh", "-c", SCRIPT],
        remove=True,
        network_mode="none",
        volumes=[f"{tmp_path}:/wheels:ro", f"{dist}:/dist:ro"],
        environment={"DOCKER_HOST": "unix:///nonexistent/docker.sock", "COLUMNS": "200"},
    ).decode()
    lines = output.splitlines()
    assert lines[0].startswith(f"Python {PYTHON}.")
    assert lines[1] == "shoal 0.1.0"
    assert [line.split()[0] for line in lines if "-training:" in line] == [one.tag for one in matrix.images]
    assert "hello from /tmp/venv --epochs 3" in lines
