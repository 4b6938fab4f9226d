"""The distributed library in the CUDA 11 images: its own tests there, and its engines over two containers."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import distribution
from pathlib import Path

import pytest
from testcontainers.core.network import Network

from shoal.matrix.spec import BuildSpec

from ..repeats import SEED, in_soak, only_in_soak
from ..tested_images import PYTORCH_CU130, PYTORCH_LATEST
from .conftest import ROOT, Ended, StartHost, write_tree

HOSTS = ("algo-1", "algo-2")
COLLECTIVES = ROOT / "tests/library/ranks/smddp.py"
STAGES = ROOT / "tests/library/ranks/modelparallel.py"
TRAINING = """\
import runpy, sys

sys.argv[1:] = ["against_one_process", "sgd"]  # for those of the launch
runpy.run_path("/opt/ml/code/modelparallel.py", run_name="__main__")
"""
# With torch, on what the image has installed. The others know nothing of torch. Examples train there in test_run.py.
SUITE = (
    *("checkpoint", "devices", "distributed", "gradients", "modelparallel", "nccl", "parallel", "rehearsal"),
    *("smddp", "training"),
)
MODEL = """\
import torch
def large():  # 16 GiB with Adam
    return torch.nn.Sequential(*(torch.nn.Linear(8192, 8192) for _ in range(16))), (torch.empty(16, 8192),)
"""
PYTEST = ("pytest", "pytest-timeout", "pluggy", "iniconfig", "packaging", "pygments")


@pytest.mark.long
def test_the_librarys_suite_on_the_oldest_torch(start_host: StartHost, pytorch: str, tmp_path: Path) -> None:
    """By this environment's pytest, which is pure Python; all but what is marked `once`."""
    files = [f"tests/library/test_{name}.py" for name in SUITE]
    ended = run_tests(start_host, pytorch, tmp_path, "--confcutdir=tests/library", "-m", "not once", *files)
    assert ended.code == 0, ended.output


@pytest.mark.long
@pytest.mark.parametrize("image", [PYTORCH_CU130, PYTORCH_LATEST])
def test_nccl_of_the_recorded_torch(start_host: StartHost, image: str, tmp_path: Path) -> None:
    """Its classes are as they are recorded, and torch dispatches to them; there is no GPU."""
    files = [f"tests/library/test_{name}.py" for name in ("nccl", "devices")]
    ended = run_tests(start_host, image, tmp_path, "--confcutdir=tests/library", *files)
    assert ended.code == 0, ended.output


@pytest.mark.long
@pytest.mark.parametrize("suite", ["dataparallel", "checkpoint", "modelparallel"])
def test_the_librarys_suite_on_tensorflow(start_host: StartHost, matrix: BuildSpec, tmp_path: Path, suite: str) -> None:
    """All that tests TensorFlow's fronts: it is installed nowhere but in its images."""
    folder = "tests/library_tensorflow"
    file = f"{folder}/test_{suite}.py"
    ended = run_tests(start_host, matrix.select("tensorflow").tag, tmp_path, f"--confcutdir={folder}", file)
    assert ended.code == 0, ended.output


@pytest.mark.long
@pytest.mark.parametrize(
    "only",
    [
        ("-k", "keras_3 or fit_trains or training_is_that or compressed or refused"),
        in_soak((), name="all"),
    ],
)
def test_the_librarys_suite_on_keras_3(
    start_host: StartHost, matrix: BuildSpec, tmp_path: Path, only: tuple[str, ...]
) -> None:
    """Data parallel training and checkpoints, with TensorFlow 2.21."""
    folder = "tests/library_tensorflow"
    files = [f"{folder}/test_{name}.py" for name in ("keras_3", "dataparallel", "checkpoint")]
    image = matrix.select("tensorflow-cpu").tag
    ended = run_tests(start_host, image, tmp_path, f"--confcutdir={folder}", *only, *files)
    assert ended.code == 0, ended.output


@only_in_soak
def test_the_librarys_soak_on_tensorflow(start_host: StartHost, matrix: BuildSpec, tmp_path: Path) -> None:
    folder = "tests/library_tensorflow"
    options = f"--confcutdir={folder}", "-m", "soak", "--timeout=3000", folder
    soak = {"SHOAL_SOAK": "1", "SHOAL_SEED": str(SEED)}
    ended = run_tests(start_host, matrix.select("tensorflow").tag, tmp_path, *options, seconds=3000, environ=soak)
    assert ended.code == 0, ended.output


def run_tests(
    start_host: StartHost,
    image: str,
    directory: Path,
    *arguments: str,
    seconds: int = 580,
    environ: Mapping[str, str] | None = None,
) -> Ended:
    """Run pytest in a container of `image`, on the library that is installed there; `directory` is for pytest's own."""
    copy_distributions(PYTEST, directory)
    mounted = {ROOT / name: f"/work/{name}" for name in ("tests", "examples", "pyproject.toml")}
    host = start_host(
        image,
        ["python", "-m", "pytest", "-p", "no:cacheprovider", *arguments],
        volumes={**mounted, directory: "/pytest"},
        env={"PYTHONPATH": "/work:/pytest", "PYTHONDONTWRITEBYTECODE": "1", **(environ or {})},
        working_dir="/work",
    )
    return host.wait(timeout=seconds)


def test_a_model_is_planned_in_the_image(pytorch: str, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    shoal = Path(sys.executable).with_name("shoal")
    command = [str(shoal), "estimate", pytorch, f"{tmp_path}/model.py:large", "--memory", "9"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert 'recommended: {"partitions": 2, "microbatches": 16, "active_microbatches": 4}' in ended.stdout
    ended = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["recommended"] == {"partitions": 2, "microbatches": 16, "active_microbatches": 4}


def copy_distributions(names: tuple[str, ...], target: Path) -> None:
    """Copy installed packages as they are."""
    for name in names:
        for file in distribution(name).files or ():
            if ".." not in file.parts and file.suffix != ".pyc":
                (target / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(str(file.locate()), target / file)


def test_every_collective_on_two_hosts(start_host: StartHost, pytorch: str, network: Network, tmp_path: Path) -> None:
    """By torchrun. What mpirun starts on two hosts reduces below, and in tests/conformance."""
    values = {"sagemaker_torch_distributed_enabled": True, "sagemaker_mpi_num_of_processes_per_host": 2}
    trees = [write_tree(tmp_path / name, COLLECTIVES.read_text(), values, HOSTS, name) for name in HOSTS]
    hosts = [start_host(pytorch, tree=tree, network=network, alias=tree.name) for tree in trees]
    ended = [host.wait() for host in hosts]
    assert [end.code for end in ended] == [0, 0], ended
    assert ended[0].output.count("shm+gloo: 2 hosts × 2 ranks") == 4


@pytest.mark.parametrize(
    ("parameters", "hosts_of_stages"),
    [
        in_soak({"partitions": 2, "ddp": True}, [2, 2], name="a replica on each host"),
        pytest.param({"partitions": 2, "ddp": True, "placement_strategy": "spread"}, [1, 1], id="a stage on each host"),
    ],
)
def test_stages_on_two_hosts_train_as_one_process_does(
    start_host: StartHost,
    pytorch: str,
    network: Network,
    tmp_path: Path,
    parameters: dict[str, object],
    hosts_of_stages: list[int],
) -> None:
    """Messages of a pipeline between hosts; the gradients of replicas there are reduced by the test above too."""
    values = {"sagemaker_mpi_enabled": True, "sagemaker_mpi_num_of_processes_per_host": 2, "mp_parameters": parameters}
    trees = [write_tree(tmp_path / name, TRAINING, values, HOSTS, name) for name in HOSTS]
    for tree in trees:
        shutil.copy(STAGES, tree / "code")
    hosts = [start_host(pytorch, tree=tree, network=network, alias=tree.name) for tree in trees]
    ended = [host.wait(timeout=240) for host in hosts]
    assert [end.code for end in ended] == [0, 0], ended
    equal = re.findall(r"equal: stage (\d) on (\S+)", ended[0].output)  # the first host starts all ranks
    assert len(equal) == 4, ended
    stages = [{host for at, host in equal if int(at) == stage} for stage in range(len(hosts_of_stages))]
    assert [len(hosts) for hosts in stages] == hosts_of_stages
    assert len(set.union(*stages)) == 2
