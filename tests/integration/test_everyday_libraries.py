"""Libraries that people train with, on the ranks of the library here: they end as plain torch does in one process.

On one host and today's torch, each with the launcher that its users start it with; on two hosts, by torchrun and on the
oldest torch. What the images lack, the job's requirements.txt brings. See everyday/all_of_them.py.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from testcontainers.core.network import Network

from shoal.matrix.spec import BuildSpec
from shoal.network.settings import read_network_settings

from .. import cache
from ..repeats import only_in_soak
from ..tested_images import HUGGINGFACE_CPU
from .conftest import Host, StartHost, write_tree

EVERYDAY = Path(__file__).with_name("everyday")
HOSTS = ("algo-1", "algo-2")
BY_TORCHRUN = {"sagemaker_torch_distributed_enabled": True, "sagemaker_mpi_num_of_processes_per_host": 2}
ON_ONE_HOST = (
    *("mpi4py", "lightning", "transformers", "accelerate on smddp", "accelerate launch"),
    *("deepspeed stage 1", "deepspeed stage 2"),
)
ON_TWO_HOSTS = ("lightning", "transformers", "accelerate on nccl")
OF_TORCH_2_0 = "lightning==2.2.5\n"


def start(start_host: StartHost, image: str, tree: Path, requirements: str, network: Network | None = None) -> Host:
    """Start the scripts on a host that reaches packages as this machine does, and keeps pip's downloads and wheels."""
    for file in EVERYDAY.iterdir():
        if file.is_file():
            shutil.copy(file, tree / "code")
    (tree / "code" / "train.py").write_text((EVERYDAY / "all_of_them.py").read_text())
    (tree / "code" / "requirements.txt").write_text(requirements)
    configuration = tree.with_name(f"{tree.name}-machine")
    configuration.mkdir()
    for name, content in read_network_settings().build_files("bookworm").items():
        (configuration / name).write_bytes(content)
    return start_host(
        image,
        tree=tree,
        volumes={configuration: "/run/machine", cache.DIRECTORY / "pip": "/pip"},
        env={
            "PIP_CONFIG_FILE": "/run/machine/pip.conf",
            "PIP_CACHE_DIR": "/pip",
            **dict(read_network_settings().proxies),
        },
        network=network,
        alias=tree.name,
    )


@pytest.mark.long
def test_everyday_libraries_train_as_plain_torch_does(start_host: StartHost, tmp_path: Path) -> None:
    image = HUGGINGFACE_CPU
    tree = write_tree(tmp_path / "ml", "")
    ended = start(start_host, image, tree, (EVERYDAY / "requirements.txt").read_text()).wait(timeout=580)
    assert ended.code == 0, ended.output
    for library in ON_ONE_HOST:
        assert f"equal: {library}" in ended.output, library


@only_in_soak
@pytest.mark.long
def test_everyday_libraries_on_two_hosts_and_the_oldest_torch(
    start_host: StartHost, matrix: BuildSpec, network: Network, tmp_path: Path
) -> None:
    """Between hosts, the backend reduces in test_library.py too, on the same torch."""
    image = matrix.select("huggingface").tag
    trees = [write_tree(tmp_path / name, "", BY_TORCHRUN, HOSTS, name) for name in HOSTS]
    hosts = [start(start_host, image, tree, OF_TORCH_2_0, network) for tree in trees]
    ended = [host.wait(timeout=580) for host in hosts]
    assert [end.code for end in ended] == [0, 0], ended
    for library in ON_TWO_HOSTS:
        assert f"equal: {library}" in ended[0].output, library
