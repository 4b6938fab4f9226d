"""The distributed library in the CUDA 11 image: its own tests there, and its engines over two containers."""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

import pytest
from testcontainers.core.network import Network

from .conftest import ROOT, StartHost, write_tree

HOSTS = ("algo-1", "algo-2")
COLLECTIVES = ROOT / "tests/library/ranks/smddp.py"
# With torch, on what the image has installed. The others know nothing of torch.
SUITES = ("devices", "distributed", "examples", "parallel", "rehearsal", "smddp", "training")
MODEL = """\
import torch

def large():  # 16 GiB with Adam
    return torch.nn.Sequential(*(torch.nn.Linear(8192, 8192) for _ in range(16))), (torch.empty(16, 8192),)
"""
PYTEST = ("pytest", "pytest-timeout", "pluggy", "iniconfig", "packaging", "pygments")


def test_the_librarys_suite_on_the_oldest_torch(start_host: StartHost, pytorch: str, tmp_path: Path) -> None:
    """By this environment's pytest, which is pure Python; all but what is marked `once`."""
    copy_distributions(PYTEST, tmp_path)
    command = ["python", "-m", "pytest", "-p", "no:cacheprovider", "--confcutdir=tests/library", "-m", "not once"]
    mounted = {ROOT / name: f"/work/{name}" for name in ("tests", "examples", "pyproject.toml")}
    host = start_host(
        pytorch,
        command + [f"tests/library/test_{name}.py" for name in SUITES],
        volumes={**mounted, tmp_path: "/pytest"},
        env={"PYTHONPATH": "/work:/pytest", "PYTHONDONTWRITEBYTECODE": "1"},
        working_dir="/work",
    )
    ended = host.wait(timeout=580)
    assert ended.code == 0, ended.output


def test_a_model_is_planned_in_the_image(pytorch: str, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    shoal = Path(sys.executable).with_name("shoal")
    command = [str(shoal), "plan-model", pytorch, f"{tmp_path}/model.py:large", "--memory", "9"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert 'recommended: {"partitions": 2, "microbatches": 16, "active_microbatches": 4}' in ended.stdout


def copy_distributions(names: tuple[str, ...], target: Path) -> None:
    """Copy installed packages as they are."""
    for name in names:
        for file in distribution(name).files or ():
            if ".." not in file.parts and file.suffix != ".pyc":
                (target / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(str(file.locate()), target / file)


@pytest.mark.parametrize("launcher", ["sagemaker_mpi_enabled", "sagemaker_torch_distributed_enabled"])
def test_every_collective_on_two_hosts(
    start_host: StartHost, pytorch: str, network: Network, tmp_path: Path, launcher: str
) -> None:
    values: dict[str, object] = {launcher: True, "sagemaker_mpi_num_of_processes_per_host": 2}
    trees = [write_tree(tmp_path / name, COLLECTIVES.read_text(), values, HOSTS, name) for name in HOSTS]
    hosts = [start_host(pytorch, tree=tree, network=network, alias=tree.name) for tree in trees]
    ended = [host.wait() for host in hosts]
    assert [end.code for end in ended] == [0, 0], ended
    assert ended[0].output.count("shm+gloo: 2 hosts × 2 ranks") == 4
