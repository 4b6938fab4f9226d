"""Two containers on a network of their own: MPI without ssh, one verdict on both."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from testcontainers.core.network import Network

from .conftest import Ended, Host, StartHost, write_tree

HOSTS = ("algo-1", "algo-2")
MPI = {"sagemaker_mpi_enabled": True, "sagemaker_mpi_num_of_processes_per_host": 1}


def start_both(
    start_host: StartHost,
    image: str,
    network: Network,
    tmp_path: Path,
    script: str,
    secrets: tuple[str, str] | None = None,
) -> dict[str, Host]:
    hosts = {}
    for number, name in enumerate(HOSTS):
        tree = write_tree(tmp_path / name, script, MPI, HOSTS, name)
        env = {"SHOAL_JOB_SECRET": secrets[number], "SHOAL_HOSTS_TIMEOUT": "5"} if secrets else {}
        hosts[name] = start_host(image, tree=tree, network=network, alias=name, env=env)
    return hosts


def wait_both(hosts: dict[str, Host]) -> dict[str, Ended]:
    return {name: host.wait() for name, host in hosts.items()}


@pytest.mark.parametrize("secrets", [None, ("same", "same")])
def test_ranks_meet_and_each_sees_its_own_host(
    start_host: StartHost, pytorch: str, network: Network, tmp_path: Path, secrets: tuple[str, str] | None
) -> None:
    script = (
        "import json, os, pathlib\nfrom mpi4py import MPI\n"
        "names = ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'MASTER_ADDR', 'SM_CURRENT_HOST')\n"
        "facts = {name: os.environ[name] for name in names} | {'sum': MPI.COMM_WORLD.allreduce(1)}\n"
        "facts['secret'] = 'SHOAL_JOB_SECRET' in os.environ\n"
        "pathlib.Path(os.environ['SM_OUTPUT_DATA_DIR'], 'facts.json').write_text(json.dumps(facts))\n"
    )
    hosts = start_both(start_host, pytorch, network, tmp_path, script, secrets)
    ended = wait_both(hosts)
    assert {name: end.code for name, end in ended.items()} == {"algo-1": 0, "algo-2": 0}, ended
    for rank, (name, host) in enumerate(hosts.items()):
        assert json.loads(host.path("output/data/facts.json").read_text()) == {
            "RANK": str(rank),
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "algo-1",
            "SM_CURRENT_HOST": name,
            "sum": 2,
            "secret": False,
        }
        assert host.path("output/success").exists()


@pytest.mark.parametrize("failing_rank", [0, 1])
def test_a_failure_is_the_verdict_on_every_host(
    start_host: StartHost, pytorch: str, network: Network, tmp_path: Path, failing_rank: int
) -> None:
    script = (
        "import os, sys\nfrom mpi4py import MPI\n"
        f"if MPI.COMM_WORLD.rank == {failing_rank}:\n    sys.exit(42)\nMPI.COMM_WORLD.barrier()\n"
    )
    hosts = start_both(start_host, pytorch, network, tmp_path, script)
    ended = wait_both(hosts)
    assert {name: end.code for name, end in ended.items()} == {"algo-1": 42, "algo-2": 42}, ended
    for host in hosts.values():
        assert host.path("output/failure").exists()
        assert not host.path("output/success").exists()


def test_an_exception_on_the_second_host_is_told_on_both(
    start_host: StartHost, pytorch: str, network: Network, tmp_path: Path
) -> None:
    script = "import os\nif os.environ['RANK'] == '1':\n    raise ValueError('bad batch')\n"
    hosts = start_both(start_host, pytorch, network, tmp_path, script)
    ended = wait_both(hosts)
    assert {end.code for end in ended.values()} == {1}, ended
    for host in hosts.values():
        failure = host.path("output/failure").read_text()
        assert failure.splitlines()[0] == "ValueError: bad batch"
        assert "rank 1" in failure
        assert "algo-2" in failure


def test_hosts_with_different_secrets_do_not_start_anything(
    start_host: StartHost, pytorch: str, network: Network, tmp_path: Path
) -> None:
    hosts = start_both(start_host, pytorch, network, tmp_path, "print('ran')", ("one", "two"))
    hosts["algo-1"].wait()
    ended = wait_both(hosts)
    assert all(end.code not in (0, 42) for end in ended.values()), ended
    assert all("ran" not in end.output.split() for end in ended.values())


def test_a_stranger_on_the_network_cannot_start_anything(
    start_host: StartHost, pytorch: str, network: Network, tmp_path: Path
) -> None:
    tree = write_tree(tmp_path / "algo-2", "print(1)", MPI, HOSTS, "algo-2")
    worker = start_host(pytorch, tree=tree, network=network, alias="algo-2", env={"SHOAL_HOSTS_TIMEOUT": "15"})
    probe = (
        "import socket, time\n"
        "deadline = time.monotonic() + 10\n"
        "while True:\n"
        "    try:\n"
        "        peer = socket.create_connection(('algo-2', 7411), 5)\n"
        "        break\n"
        "    except OSError:\n"
        "        assert time.monotonic() < deadline\n"
        "        time.sleep(0.1)\n"
        "peer.settimeout(10)\n"
        'peer.sendall(b\'\\x00\\x00\\x00\\x10{"start": ["id"]}\' * 100)\n'
        "received = b''\n"
        "try:\n"
        "    while chunk := peer.recv(4096):\n"
        "        received += chunk\n"
        "except ConnectionResetError:\n"
        "    pass\n"
        "print('closed after', len(received), b'uid=' in received)\n"
    )
    stranger = start_host(pytorch, ["python", "-c", probe], network=network, alias="stranger")
    ended = stranger.wait()
    assert ended.code == 0, ended.output
    assert "closed after" in ended.output
    assert "False" in ended.output
    end = worker.wait()
    assert end.code != 0, end.output
    assert "algo-1" in end.output  # it names the host that it waited for


def test_a_host_that_never_comes_is_named(
    start_host: StartHost, pytorch: str, network: Network, tmp_path: Path
) -> None:
    tree = write_tree(tmp_path / "algo-1", "print(1)", MPI, HOSTS, "algo-1")
    host = start_host(pytorch, tree=tree, network=network, alias="algo-1", env={"SHOAL_HOSTS_TIMEOUT": "3"})
    ended = host.wait()
    assert ended.code != 0
    assert "algo-2" in host.path("output/failure").read_text()
