"""The distributed library in the CUDA 11 image, over two containers: its engines, under both launchers."""

from __future__ import annotations

from pathlib import Path

import pytest
from testcontainers.core.network import Network

from .conftest import ROOT, StartHost, write_tree

HOSTS = ("algo-1", "algo-2")
COLLECTIVES = ROOT / "tests/library/ranks/smddp.py"


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
