"""Two containers on a network of their own: MPI without ssh, one result on both."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from docker.models.containers import Container
from testcontainers.core.network import Network

from .. import attacker, impostor
from ..tested_images import PYTORCH_CPU
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


def test_ranks_meet_and_each_sees_its_own_host(
    start_host: StartHost, pytorch: str, network: Network, tmp_path: Path
) -> None:
    """With a secret; without one, the others here."""
    script = (
        "import json, os, pathlib\nfrom mpi4py import MPI\n"
        "names = ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'MASTER_ADDR', 'SM_CURRENT_HOST')\n"
        "facts = {name: os.environ[name] for name in names} | {'sum': MPI.COMM_WORLD.allreduce(1)}\n"
        "facts['secret'] = 'SHOAL_JOB_SECRET' in os.environ\n"
        "pathlib.Path(os.environ['SM_OUTPUT_DATA_DIR'], 'facts.json').write_text(json.dumps(facts))\n"
    )
    hosts = start_both(start_host, pytorch, network, tmp_path, script, ("same", "same"))
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


def test_a_failure_is_the_result_on_every_host(
    start_host: StartHost, pytorch: str, network: Network, tmp_path: Path
) -> None:
    """On the first host; on the second, test_run.py."""
    script = (
        "import os, sys\nfrom mpi4py import MPI\n"
        "if MPI.COMM_WORLD.rank == 0:\n    sys.exit(42)\nMPI.COMM_WORLD.barrier()\n"
    )
    hosts = start_both(start_host, pytorch, network, tmp_path, script)
    ended = wait_both(hosts)
    assert {name: end.code for name, end in ended.items()} == {"algo-1": 42, "algo-2": 42}, ended
    for host in hosts.values():
        assert host.path("output/failure").exists()
        assert not host.path("output/success").exists()


def test_an_exception_on_the_second_host_is_reported_on_both(
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


@dataclass(frozen=True)
class Guarded:
    """The worker of a job with a secret, whose orted notes that it was started; and containers that speak to it."""

    worker: Host
    start_host: StartHost
    image: str
    network: Network

    def container(self, alias: str) -> Container:
        """A container that stays, and has a name on the network."""
        program = {Path(impostor.__file__): "/impostor.py"}
        host = self.start_host(self.image, ["sleep", "300"], network=self.network, alias=alias, volumes=program)
        return host.engines

    @property
    def started(self) -> list[str]:
        """What the noting orted was started for."""
        notes = self.worker.path(f"model/{impostor.STARTED}")
        return notes.read_text().splitlines() if notes.exists() else []

    def lets_only_the_first_host_start(self, first: Container) -> None:
        """The worker still lets the first host in, and that one's start is the only one."""
        claim(first, "right", "ready")
        ended = self.worker.wait()
        assert ended.code == 0, ended.output
        assert self.started == [impostor.trace("right", "ready")]


@pytest.fixture
def guarded(start_host: StartHost, network: Network, tmp_path: Path) -> Guarded:
    image = PYTORCH_CPU
    orted = tmp_path / "orted"
    orted.write_text(impostor.ORTED)
    orted.chmod(0o755)
    tree, env = write_tree(tmp_path / "algo-2", "", MPI, HOSTS, "algo-2"), {"SHOAL_JOB_SECRET": "right"}
    mounts = {orted: "/opt/venv/bin/orted"}
    worker = start_host(image, tree=tree, network=network, alias="algo-2", env=env, volumes=mounts)
    return Guarded(worker, start_host, image, network)


def claim(container: Container, secret: str, when: str) -> dict[str, Any]:
    """Speak to the worker as the first host does, from a container; returns what the impostor prints."""
    code, output = container.exec_run(["python", "/impostor.py", "algo-2", "", secret, when])
    assert isinstance(output, bytes)
    assert code == 0, output.decode()
    said: dict[str, Any] = json.loads(output)
    return said


def test_the_first_host_is_welcomed_and_starts_a_daemon(guarded: Guarded) -> None:
    """Shows that the impostors below speak the protocol: they differ from this one in secret or name only."""
    said = claim(guarded.container("algo-1"), "right", "ready")
    assert (said["received"], said["is_proved"]) == (["Hello", "Welcome", "Facts", "Ready", "CommandEnded"], True)
    assert guarded.worker.wait().code == 0
    assert guarded.started == [impostor.trace("right", "ready")]


def test_a_start_without_the_proof_starts_nothing(guarded: Guarded) -> None:
    """Before a wrong proof, after one, or with the right secret from a container that is not the first host.

    The first host's name is another container's: that stranger is rejected by its address.
    """
    first, stranger = guarded.container("algo-1"), guarded.container("stranger")
    said = claim(first, "wrong", "before")
    assert (said["received"], guarded.started) == (["Hello"], [])
    said = claim(first, "wrong", "after")
    assert (said["received"], guarded.started) == (["Hello", "Refused"], [])
    assert said["reason"] == "its SHOAL_JOB_SECRET is not this host's"
    said = claim(stranger, "right", "after")
    assert (said["received"], guarded.started) == ([], [])
    guarded.lets_only_the_first_host_start(first)
    assert "rejected a connection from" in guarded.worker.wait().output


def test_a_daemon_with_a_parameter_of_no_plan_is_not_started(guarded: Guarded) -> None:
    """Not even for who has the secret."""
    said = claim(guarded.container("algo-1"), "right", "unplanned")
    assert guarded.worker.wait().code == 1
    assert guarded.started == []
    assert "the MCA parameter 'mca_base_component_path' = '/tmp', which is not in this host's plan" in said["reason"]


def test_a_job_under_attack_from_its_own_network_runs_to_its_end(
    start_host: StartHost, network: Network, tmp_path: Path
) -> None:
    """From another container, and from the first host's own, whose address the worker greets."""
    image = PYTORCH_CPU
    trees = [write_tree(tmp_path / name, "print('trained')", MPI, HOSTS, name) for name in HOSTS]
    secret, program = {"SHOAL_JOB_SECRET": "right"}, {Path(attacker.__file__): "/attacker.py"}
    idle = {"command": ["sleep", "300"], "network": network, "volumes": program}
    worker = start_host(image, tree=trees[1], network=network, alias="algo-2", env=secret)
    first = start_host(image, tree=trees[0], alias="algo-1", env=secret, **idle).engines
    attackers = (first, start_host(image, alias="stranger", **idle).engines)
    for container in attackers:
        container.exec_run(["python", "/attacker.py", "algo-2", "/tmp/hung-up"], detach=True)
    for container in attackers:
        waits = "until [ -e /tmp/hung-up ]; do sleep 0.1; done"
        assert container.exec_run(["timeout", "60", "sh", "-c", waits]).exit_code == 0
    code, output = first.exec_run(["train"])
    assert isinstance(output, bytes)
    assert code == 0, output.decode()
    assert output.decode().count("trained\n") == 2
    assert worker.wait().code == 0
