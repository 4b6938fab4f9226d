"""Each framework's own launchers, in its own image, over two containers.

With strangers on the network, which change nothing: test_members.py has torchrun and TensorFlow's strategies.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from testcontainers.core.network import Network

from shoal.matrix.spec import BuildSpec

from ..repeats import in_soak
from .conftest import Ended, Host, StartHost, write_tree

HOSTS = ("algo-1", "algo-2")

TORCH = """\
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(total)
print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {total.item():.0f}", os.environ["SM_CURRENT_HOST"])
dist.destroy_process_group()
"""


@pytest.fixture(scope="session")
def tensorflow(matrix: BuildSpec) -> str:
    return matrix.select("tensorflow").tag


def job(
    start_host: StartHost, image: str, network: Network, tmp_path: Path, script: str, values: Mapping[str, object]
) -> tuple[list[Ended], list[Host]]:
    trees = [write_tree(tmp_path / name, script, dict(values), HOSTS, name) for name in HOSTS]
    hosts = [start_host(image, tree=tree, network=network, alias=tree.name) for tree in trees]
    return [host.wait() for host in hosts], hosts


def assert_success(ended: list[Ended], hosts: list[Host]) -> None:
    assert [end.code for end in ended] == [0, 0], ended
    for host in hosts:
        assert host.path("output/success").exists()
        assert not host.path("output/failure").exists()


@pytest.mark.parametrize("launcher", ["sagemaker_pytorch_ddp_enabled", "sagemaker_distributed_dataparallel_enabled"])
def test_torch_by_mpirun(start_host: StartHost, pytorch: str, network: Network, tmp_path: Path, launcher: str) -> None:
    """With a rank on each host; with several, test_library.py."""
    values = {launcher: True, "sagemaker_mpi_num_of_processes_per_host": 1}
    ended, hosts = job(start_host, pytorch, network, tmp_path, TORCH, values)
    assert_success(ended, hosts)
    ranks = re.findall(r"rank (\d) of (\d): (\d+) (\S+)", ended[0].output)
    assert sorted(ranks) == [("0", "2", "3", "algo-1"), ("1", "2", "3", "algo-2")]


def test_modelparallel_under_mpi(start_host: StartHost, pytorch: str, network: Network, tmp_path: Path) -> None:
    """What the SDK sends: the configuration reaches the script as an argument and as a variable."""
    values = {
        "sagemaker_mpi_enabled": True,
        "sagemaker_mpi_num_of_processes_per_host": 1,
        "sagemaker_mpi_custom_mpi_options": "-verbose -x NCCL_DEBUG=VERSION",
        "sagemaker_instance_type": "local",
        "sagemaker_distributed_dataparallel_enabled": False,
        "mp_parameters": {"partitions": 2, "ddp": True},
    }
    script = "import os, sys\nprint(os.environ['RANK'], sys.argv[1:], os.environ['SM_HP_MP_PARAMETERS'])\n"
    ended, hosts = job(start_host, pytorch, network, tmp_path, script, values)
    assert_success(ended, hosts)
    for rank in "01":
        assert (
            f"{rank} ['--mp_parameters', 'ddp=True,partitions=2'] {{\"ddp\":true,\"partitions\":2}}" in ended[0].output
        )


@pytest.mark.parametrize("done", [in_soak(""), "algo-2"])
def test_a_parameter_server_that_ends_ends_the_job(
    start_host: StartHost, tensorflow: str, network: Network, tmp_path: Path, done: str
) -> None:
    """Its port is taken on one host: both hosts fail, and the log says why. Also where that host's script is done."""
    script = f"import os, time\nos.environ['SM_CURRENT_HOST'] == {done!r} or time.sleep(120)\n"
    values = {"sagemaker_parameter_server_enabled": True}
    trees = [write_tree(tmp_path / name, script, values, HOSTS, name) for name in HOSTS]
    taken = "import socket, time; s = socket.create_server(('', 2223)); time.sleep(99)"
    squatter = ["sh", "-c", f'python -c "{taken}" & train']
    hosts = [
        start_host(tensorflow, "train", tree=trees[0], network=network, alias="algo-1"),
        start_host(tensorflow, squatter, tree=trees[1], network=network, alias="algo-2"),
    ]
    ended = [host.wait() for host in hosts]
    assert all(end.code not in (0, 137) for end in ended), ended
    for host in hosts:
        assert "the parameter server on algo-2" in host.path("output/failure").read_text()
