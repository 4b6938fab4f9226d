"""The hosts of a job without resourceconfig.json: each platform's variables, and what is wrong with half of them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal_toolkit.discovery import sources
from shoal_toolkit.discovery.host_list import HINTS, SOURCES, HostList
from shoal_toolkit.discovery.sources import expand_hosts, find_hosts
from shoal_toolkit.errors import ContractError
from shoal_toolkit.job.contract import Paths, read_cluster
from shoal_toolkit.job.settings import take_settings, warn_without_secret

from .conftest import Run, Tree

EXPLICIT = {"SHOAL_HOSTS": "a,b", "SHOAL_HOST_RANK": "1"}
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_ID": "0",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "0",
    "SLURMD_NODENAME": "n2",
}
INTERACTIVE = {
    **SLURM,
    "SLURM_STEP_ID": "4294967290",
    "SLURM_STEP_NODELIST": "n1",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_NODEID": "0",
    "SLURMD_NODENAME": "n1",
}
JOB_SET = {"SHOAL_HOSTS": "js-w-[0-1]-[0-1].js", "JOB_COMPLETION_INDEX": "1"}
TRAINJOB = {
    "PET_NNODES": "2",
    "PET_NODE_RANK": "1",
    "PET_NPROC_PER_NODE": "auto",
    "PET_MASTER_ADDR": "digits-node-0-0.digits",
    "PET_MASTER_PORT": "29400",
    "JOB_COMPLETION_INDEX": "1",
}
PYTORCHJOB = {
    "MASTER_ADDR": "digits-master-0",
    "MASTER_PORT": "23456",
    "WORLD_SIZE": "3",
    "RANK": "2",
    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
}
BATCH = {
    "AWS_BATCH_JOB_ID": "0aaa#1",
    "AWS_BATCH_JOB_NUM_NODES": "3",
    "AWS_BATCH_JOB_NODE_INDEX": "2",
    "AWS_BATCH_JOB_MAIN_NODE_INDEX": "1",
    "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": "10.0.0.5",
}
SKYPILOT = {
    "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NUM_GPUS_PER_NODE": "8",
}
MPI = {"K_MPI_JOB_ROLE": "worker"}
HOSTFILE = "digits-launcher.digits.default.svc slots=1\ndigits-worker-0.digits.default.svc slots=1\n"


def without(variables: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name not in names}


def find(environ: dict[str, str], hostname: str = "box", root: str = "/nowhere") -> HostList:
    found = find_hosts(environ, hostname, root)
    assert found is not None
    return found


# Each platform


@pytest.mark.parametrize(
    ("environ", "hostname", "source", "hosts", "rank"),
    [
        (EXPLICIT, "box", "SHOAL_HOSTS", ("a", "b"), 1),
        ({"SHOAL_HOSTS": "n[08-10] m"}, "m", "SHOAL_HOSTS", ("n08", "n09", "n10", "m"), 3),
        ({"SHOAL_HOSTS": "a.x,b.x"}, "b", "SHOAL_HOSTS", ("a.x", "b.x"), 1),
        ({"SHOAL_HOSTS": "a,b"}, "b.cluster.local", "SHOAL_HOSTS", ("a", "b"), 1),
        ({"SHOAL_HOSTS": "localhost", "JOB_COMPLETION_INDEX": "0"}, "p-0", "SHOAL_HOSTS", ("localhost",), 0),
        ({"SHOAL_HOSTS": "p-[0-1].s", "JOB_COMPLETION_INDEX": "1"}, "x", "SHOAL_HOSTS", ("p-0.s", "p-1.s"), 1),
        ({"SHOAL_HOSTS": "N1.x.,n2"}, "n1.x", "SHOAL_HOSTS", ("N1.x.", "n2"), 0),
        ({"SHOAL_HOSTS": "n1,N2"}, "n2.X.", "SHOAL_HOSTS", ("n1", "N2"), 1),
        ({"SHOAL_HOSTS": "10.0.0.1,10.0.0.2"}, "10.0.0.2", "SHOAL_HOSTS", ("10.0.0.1", "10.0.0.2"), 1),
        (JOB_SET, "js-w-1-1", "SHOAL_HOSTS", ("js-w-0-0.js", "js-w-0-1.js", "js-w-1-0.js", "js-w-1-1.js"), 3),
        (JOB_SET, "js-w-0-1", "SHOAL_HOSTS", ("js-w-0-0.js", "js-w-0-1.js", "js-w-1-0.js", "js-w-1-1.js"), 1),
        ({**EXPLICIT, "JOB_COMPLETION_INDEX": "0"}, "box", "SHOAL_HOSTS", ("a", "b"), 1),
        (SLURM, "box", "Slurm", ("n1", "n2"), 1),
        ({**SLURM, "SLURM_STEP_NUM_TASKS": ""}, "box", "Slurm", ("n1", "n2"), 1),
        ({"SLURM_JOB_NODELIST": "n7", "SLURM_JOB_NUM_NODES": "1"}, "n7.x", "Slurm", ("n7",), 0),
        ({"SLURM_JOB_NODELIST": "n7", "SLURMD_NODENAME": "n7"}, "box", "Slurm", ("n7",), 0),
        ({**INTERACTIVE, "SLURM_JOB_NODELIST": "n1", "SLURM_JOB_NUM_NODES": "1"}, "n1", "Slurm", ("n1",), 0),
        (TRAINJOB, "box", "Kubeflow", ("digits-node-0-0.digits", "digits-node-0-1.digits"), 1),
        ({"PET_NNODES": "1"}, "box", "Kubeflow", ("box",), 0),
        (PYTORCHJOB, "x", "Kubeflow", ("digits-master-0", "digits-worker-0", "digits-worker-1"), 2),
        (
            {**PYTORCHJOB, "MASTER_ADDR": "localhost", "RANK": "0"},
            "digits-master-0",
            "Kubeflow",
            ("digits-master-0", "digits-worker-0", "digits-worker-1"),
            0,
        ),
        (
            {**PYTORCHJOB, "WORLD_SIZE": "4", "PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_NPROC_PER_NODE": "2"},
            "x",
            "Kubeflow",
            ("digits-master-0", "digits-worker-0"),
            1,
        ),
        (SKYPILOT, "box", "SkyPilot", ("10.0.0.1", "10.0.0.2"), 1),
        (BATCH, "box", "AWS Batch", ("node-1", "node-0", "node-2"), 2),
        ({"AWS_BATCH_JOB_NUM_NODES": "1"}, "box", "AWS Batch", ("box",), 0),
    ],
)
def test_hosts_of_each_platform(
    environ: dict[str, str], hostname: str, source: str, hosts: tuple[str, ...], rank: int
) -> None:
    found = find(environ, hostname)
    assert (found.source, found.hosts, found.rank) == (source, hosts, rank)
    assert bool(found.warnings) == (found.registration is not None)
    assert found.current_host == hosts[rank]
    assert next(iter(environ.values())).split()[0] in found.evidence or found.source != "SHOAL_HOSTS"
    assert found.evidence


@pytest.mark.parametrize("lines", [HOSTFILE, HOSTFILE.replace(" slots=", ":"), f"# hosts\n\n{HOSTFILE}"])
def test_hosts_of_the_mpi_operator(tmp_path: Path, lines: str) -> None:
    (tmp_path / "etc/mpi").mkdir(parents=True)
    (tmp_path / "etc/mpi/hostfile").write_text(lines)
    assert find_hosts({"OMPI_MCA_orte_default_hostfile": "/etc/mpi/hostfile"}, "x", str(tmp_path)) is None, "a user's"
    for environ in (MPI, {**MPI, "OMPI_MCA_orte_default_hostfile": "/etc/mpi/hostfile"}):
        found = find(environ, "digits-worker-0", str(tmp_path))
        assert found.hosts == ("digits-launcher.digits.default.svc", "digits-worker-0.digits.default.svc")
        assert (found.source, found.rank) == ("MPI Operator", 1)
    with pytest.raises(ContractError, match=r"this pod other is not in /etc/mpi/hostfile.*runLauncherAsWorker: true"):
        find(MPI, "other", str(tmp_path))


def test_batchs_children_know_the_main_node_and_it_knows_no_child() -> None:
    child = find(BATCH).registration
    main = find(without({**BATCH, "AWS_BATCH_JOB_NODE_INDEX": "1"}, "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"))
    assert child is not None
    assert main.registration is not None
    assert (child.main_address, main.registration.main_address, main.rank) == ("10.0.0.5", "", 0)
    assert child.job == main.registration.job == "0aaa"


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({"RAY_ADDRESS": "10.0.0.1:6379"}, "Ray (RAY_ADDRESS=10.0.0.1:6379) names no hosts in variables"),
        ({"WORLD_SIZE": "2", "RANK": "1"}, "variables of a rank (WORLD_SIZE=2, RANK=1) do not name the hosts of the"),
        (
            {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"},
            "variables of a rank (MASTER_ADDR=127.0.0.1, WORLD_SIZE=2) do not name the hosts of the job",
        ),
        ({"WORLD_SIZE": "2", "NODE_RANK": "1"}, "variables of a rank (WORLD_SIZE=2, NODE_RANK=1) do not name"),
        ({"WORLD_SIZE": "2"}, "variables of a rank (WORLD_SIZE=2) do not name the hosts of the job"),
        ({"WORLD_SIZE": "2", "RANK": "1", "RAY_JOB_ID": "1"}, "Ray (RAY_JOB_ID=1) names no hosts in variables"),
    ],
)
def test_variables_that_name_no_hosts_are_a_warning(environ: dict[str, str], says: str) -> None:
    found = find(environ)
    assert (found.hosts, found.rank) == (("box",), 0)
    assert says in found.warnings[0]
    assert "a single host is assumed. Fix, for several hosts: " in found.warnings[0]


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "a", "MASTER_ADDR": "n1"},
        {"OMPI_COMM_WORLD_SIZE": "1", "PMI_SIZE": "1"},
        {"MASTER_ADDR": "n1"},
    ],
)
def test_nothing_is_found_without_a_platform(environ: dict[str, str]) -> None:
    assert find_hosts(environ, "box") is None


# Half a platform


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({"SHOAL_HOST_RANK": "0"}, "The variable SHOAL_HOST_RANK is '0', and SHOAL_HOSTS is not set"),
        ({"SHOAL_HOSTS": ""}, "The variable SHOAL_HOSTS is ''. Fix: set SHOAL_HOSTS to all hosts of the job"),
        ({"SHOAL_HOSTS": "", "SHOAL_HOST_RANK": "1"}, "SHOAL_HOST_RANK is '1' and SHOAL_HOSTS is ''. Fix: set SHOAL_"),
        ({"SHOAL_HOST_RANK": ""}, "The variable SHOAL_HOST_RANK is '', and SHOAL_HOSTS is not set"),
        ({"SHOAL_HOSTS": "a,b"}, "none of them have this host's name box. Fix: set SHOAL_HOST_RANK"),
        ({"SHOAL_HOSTS": "box.a,box.b"}, "several of them have this host's name box"),
        (
            {"SHOAL_HOSTS": "a,b", "SHOAL_HOST_RANK": "2"},
            "the rank 2, and the job has 2 hosts: ['a', 'b']. Ranks are 0 to 1",
        ),
        ({"SHOAL_HOSTS": "a,b", "SHOAL_HOST_RANK": "-1"}, "The variable SHOAL_HOST_RANK is '-1'"),
        ({"SHOAL_HOSTS": "a,a", "SHOAL_HOST_RANK": "0"}, "names the host 'a' twice"),
        ({"SHOAL_HOSTS": "node1,NODE1.", "SHOAL_HOST_RANK": "0"}, "names the host 'node1' twice"),
        ({"SHOAL_HOSTS": "a;b", "SHOAL_HOST_RANK": "0"}, "'a;b' is wrong"),
        (
            {"SHOAL_HOSTS": "fe80::1,a", "SHOAL_HOST_RANK": "0"},
            "'fe80::1' is wrong. Fix: write names or IPv4 addresses",
        ),
        ({"SHOAL_HOSTS": ",", "SHOAL_HOST_RANK": "0"}, "SHOAL_HOSTS is not a list of host names"),
        ({"SLURM_NODEID": "1"}, "Slurm: SLURM_NODEID=1 is set, and no SLURM_STEP_NODELIST"),
        (
            {"SLURM_JOB_ID": "3", "SLURM_NNODES": "2"},
            "SLURM_NNODES=2, SLURM_JOB_ID=3 is set, and no SLURM_STEP",
        ),
        ({"SLURM_STEP_ID": "0"}, "SLURM_STEP_ID=0 is set, and no SLURM_STEP_NODELIST"),
        (without(SLURM, "SLURM_NODEID"), "Slurm: the variable SLURM_NODEID is missing"),
        ({**SLURM, "SLURM_NODEID": "2"}, "the rank 2, and the job has 2 hosts"),
        (
            {**SLURM, "SLURM_NODEID": "0"},
            "SLURM_NODEID=0, SLURMD_NODENAME=n2, and the nodes are n1, n2: these disagree",
        ),
        ({**SLURM, "SLURM_STEP_NUM_NODES": "3"}, "SLURM_STEP_NUM_NODES=3, SLURM_STEP_NODELIST=n[1-2]: these disagree"),
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "4"}, "srun started 4 tasks on 2 nodes. `train` runs once on each node"),
        ({**without(SLURM, "SLURM_STEP_NUM_TASKS"), "SLURM_LOCALID": "1"}, "Fix: `srun --ntasks-per-node=1 train`"),
        ({"SLURM_JOB_NODELIST": "n1", "SLURM_STEP_NUM_TASKS": "2"}, "srun started 2 tasks on 1 nodes"),
        (
            without(SLURM, "SLURM_STEP_ID", "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_NODES", "SLURM_STEP_NUM_TASKS"),
            "this job has 2 nodes (n[1-2]), and `train` was not started by srun",
        ),
        (INTERACTIVE, "this job has 2 nodes (n[1-2]), and `train` was not started by srun"),
        ({**SLURM, "SLURM_HET_SIZE": "2"}, "this job is heterogeneous"),
        (without(TRAINJOB, "PET_NODE_RANK"), "Kubeflow: the variable PET_NODE_RANK is missing"),
        (without(TRAINJOB, "PET_NNODES"), "Kubeflow: the variable PET_NNODES is missing"),
        (without(TRAINJOB, "PET_MASTER_ADDR"), "the name of the first host is '', which does not end in -0"),
        ({**TRAINJOB, "PET_NNODES": "1:4"}, "PET_NNODES=1:4 is an elastic job"),
        ({**PYTORCHJOB, "RANK": "3"}, "Kubeflow gives this host the rank 3, and the job has 3 hosts"),
        (without(PYTORCHJOB, "RANK"), "Kubeflow: the variable RANK is missing"),
        ({"JOB_COMPLETION_INDEX": "3"}, "set SHOAL_HOSTS to the names of all pods"),
        (MPI, "MPI Operator: /etc/mpi/hostfile is missing or names no hosts"),
        (without(BATCH, "AWS_BATCH_JOB_NODE_INDEX"), "AWS Batch: the variable AWS_BATCH_JOB_NODE_INDEX is missing"),
        (without(BATCH, "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"), "this is a child node, and the variable"),
        ({**BATCH, "AWS_BATCH_JOB_NODE_INDEX": "3"}, "an index is below the number"),
        ({"SKYPILOT_NUM_NODES": "2"}, "SkyPilot: SKYPILOT_NUM_NODES=2, and SKYPILOT_NODE_IPS is not set"),
        ({"SKYPILOT_NODE_RANK": "1"}, "SkyPilot: SKYPILOT_NODE_RANK=1, and SKYPILOT_NODE_IPS is not set"),
        (without(SKYPILOT, "SKYPILOT_NODE_RANK"), "SkyPilot: the variable SKYPILOT_NODE_RANK is missing"),
        ({**SKYPILOT, "SKYPILOT_NUM_NODES": "4"}, "SKYPILOT_NUM_NODES=4, SKYPILOT_NODE_IPS=10.0.0.1 10.0.0.2: these"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "started `train` as one of several ranks (OMPI_COMM_WORLD_SIZE=2)"),
        ({"PMI_SIZE": "2", "RAY_JOB_ID": "1"}, "started `train` as one of several ranks (PMI_SIZE=2)"),
        ({"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2", "RANK": "0"}, "several ranks (LOCAL_WORLD_SIZE=2)"),
        ({"TORCHELASTIC_RUN_ID": "a", "WORLD_SIZE": "2"}, "several ranks (TORCHELASTIC_RUN_ID=a, WORLD_SIZE=2)"),
        (without(PYTORCHJOB, "KUBERNETES_SERVICE_HOST"), "(MASTER_ADDR=digits-master-0, WORLD_SIZE=3, RANK=2) do not"),
        ({"WORLD_SIZE": "2", "NODE_RANK": "1", "MASTER_ADDR": "n1"}, "do not name the hosts of the job. Fix, for sev"),
        ({"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "n1"}, "(MASTER_ADDR=n1, WORLD_SIZE=2, RANK=0) do not name"),
        ({**SLURM, **SKYPILOT, "SKYPILOT_NODE_RANK": "0"}, "Slurm gives 2 hosts and the rank 1"),
    ],
)
def test_half_a_platform_is_an_error_and_never_a_job_of_one_host(environ: dict[str, str], says: str) -> None:
    with pytest.raises(ContractError) as raised:
        find(environ)
    assert says in str(raised.value)


def test_a_step_on_some_nodes_of_a_slurm_job_is_a_warning() -> None:
    one = {**SLURM, "SLURM_STEP_NODELIST": "n2", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1"}
    found = find({**one, "SLURM_NODEID": "0"})
    assert found.hosts == ("n2",)
    assert "runs on 1 of its 2 nodes, n2" in found.warnings[0]


def test_a_job_of_one_slurm_node_warns_on_another_host() -> None:
    (warning,) = find({"SLURM_JOB_NODELIST": "n7", "SLURM_JOB_NUM_NODES": "1"}, "login1").warnings
    assert "the node n7, and this host is login1" in warning
    assert "`srun --ntasks-per-node=1 train`" in warning


# Several sources


def test_a_source_that_names_the_hosts_counts_before_the_variables_of_ranks() -> None:
    assert find({**SLURM, "PMI_SIZE": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "n1"}).source == "Slurm"


def test_shoal_hosts_counts_before_a_platform_that_agrees_disagrees_or_is_broken() -> None:
    assert find({**SLURM, **EXPLICIT}).warnings == ()
    found = find({**SLURM, "SHOAL_HOSTS": "a,b,c", "SHOAL_HOST_RANK": "0"})
    assert found.hosts == ("a", "b", "c")
    (warning,) = found.warnings
    assert "SHOAL_HOSTS gives 3 hosts" in warning
    assert "Slurm gives 2 hosts" in warning
    assert warning.endswith("SHOAL_HOSTS counts.")
    (warning,) = find({"SLURM_NODEID": "1", **EXPLICIT}).warnings
    assert warning == (
        "SHOAL_HOSTS counts, and a platform's variables are not used: Slurm: SLURM_NODEID=1 is set, and no "
        "SLURM_STEP_NODELIST."
    )


def test_resourceconfig_counts_before_everything_and_warns(tree: Tree) -> None:
    tree.hosts("algo-1", "algo-1")
    paths = Paths(str(tree.base))
    found = read_cluster(paths, "box", SLURM).found
    assert (found.source, found.hosts) == ("resourceconfig.json", ("algo-1",))
    assert "resourceconfig.json gives 1 hosts and the rank 0, and Slurm 2 hosts and the rank 1" in found.warnings[0]
    (warning,) = read_cluster(paths, "box", {"SLURM_NODEID": "1"}).found.warnings
    assert "resourceconfig.json counts, and a platform's variables are not used: Slurm: SLURM_NODEID=1" in warning
    for silent in ({}, {"SHOAL_HOSTS": "a"}, {"MASTER_ADDR": "algo-1", "WORLD_SIZE": "8", "RANK": "0"}):
        assert read_cluster(paths, "box", silent).found.warnings == ()
    tree.hosts("algo-1", "algo-1", "algo-2")
    (warning,) = read_cluster(paths, "box", SLURM).found.warnings
    assert "2 hosts and the rank 0, and Slurm 2 hosts and the rank 1" in warning


@pytest.mark.parametrize("environ", [EXPLICIT, SLURM, TRAINJOB, PYTORCHJOB, BATCH, SKYPILOT])
def test_without_a_secret_the_fix_of_each_platform_is_printed(environ: dict[str, str]) -> None:
    found = find(environ)
    without_secret, _ = take_settings({})
    (note,) = warn_without_secret(without_secret, found.hosts, found.secret)
    assert "this job has no secret" in note
    if environ is EXPLICIT:
        assert find({**EXPLICIT, "KUBERNETES_SERVICE_HOST": "10.0.0.1"}).secret == find(TRAINJOB).secret
    else:
        assert note.endswith(found.secret)
        assert "SHOAL_JOB_SECRET" in found.secret


def test_a_source_is_imported_only_if_its_variable_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(sources, "_ask", lambda name, *_: asked.append(name))
    for name, variables in {**SOURCES, **HINTS}.items():
        for variable in variables:
            find_hosts({variable: "1"}, "box")
            assert asked == [name]
            asked.clear()


# `train` itself


def test_train_prints_the_source_of_its_hosts(tree: Tree, run: Run) -> None:
    tree.script("")
    text = run("--explain", SAGEMAKER_PROGRAM="train.py", **SLURM)
    assert "hosts from   Slurm: SLURM_STEP_NODELIST=n[1-2], SLURM_NODEID=1, SLURM_JOB_ID=7\n" in text.out, text.err
    plan: dict[str, Any] = json.loads(run("--explain", "--json", SAGEMAKER_PROGRAM="train.py", **SLURM).out)
    assert plan["hosts_from"]["source"] == "Slurm"
    assert (plan["hosts"], plan["current_host"]) == (["n1", "n2"], "n2")
    assert json.loads(plan["environment"]["SM_HOSTS"]) == ["n1", "n2"]
    assert (plan["environment"]["SM_CURRENT_HOST"], plan["environment"]["RANK"]) == ("n2", "1")
    assert any("On Slurm, let the batch script write a secret to a file" in note for note in plan["notes"])


@pytest.mark.parametrize(("address", "noted"), [("zzz", 1), ("n1.domain", 0), ("N1", 0), ("127.0.0.1", 0)])
def test_an_address_that_is_not_the_first_hosts_is_a_note(tree: Tree, run: Run, address: str, noted: int) -> None:
    tree.script("")
    plan = json.loads(run("--explain", "--json", SAGEMAKER_PROGRAM="train.py", MASTER_ADDR=address, **SLURM).out)
    assert plan["environment"]["MASTER_ADDR"] == address
    assert sum("the first host is n1: the ranks meet at zzz" in note for note in plan["notes"]) == noted


def test_half_a_platform_ends_train_with_its_error(tree: Tree, run: Run) -> None:
    tree.script("print('trained')")
    done = run(SAGEMAKER_PROGRAM="train.py", SLURM_NODEID="1")
    assert (done.code, done.out) == (2, "")
    assert "Slurm: SLURM_NODEID=1 is set, and no SLURM_STEP_NODELIST" in tree.failure


# Lists of nodes


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", "n1"),
        ("n[1-3]", "n1 n2 n3"),
        ("n[9-11]", "n9 n10 n11"),
        ("n[09-11,3]x", "n09x n10x n11x n3x"),
        ("a[0-1]b[7-8]", "a0b7 a0b8 a1b7 a1b8"),
        ("n[001],m,k[1-2].x.org", "n001 m k1.x.org k2.x.org"),
        ("n[99-101]", "n99 n100 n101"),
        (" a,\nb  c ", "a b c"),
    ],
)
def test_lists_of_nodes(text: str, names: str) -> None:
    assert expand_hosts(text, "X") == tuple(names.split())


@pytest.mark.parametrize(
    "text", ["", ",", "n[1-2", "n1-2]", "n[]", "n[2-1]", "n[a]", "n[1-]", "n[[1]]", "n[1-9999999]", "n[-1]"]
)
def test_invalid_lists_of_nodes_are_errors(text: str) -> None:
    with pytest.raises(ContractError, match="The variable X "):
        expand_hosts(text, "X")


def test_a_list_cannot_take_all_memory() -> None:
    with pytest.raises(ContractError, match="names more than 65,536 hosts"):
        expand_hosts("[0-999]" * 40, "X")


def compress(numbers: list[int], width: int, randomly: random.Random) -> str:
    """Write numbers as Slurm does, each run of neighbours whole or in pieces."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][-1] == number - 1 and randomly.random() < 0.8:
            parts[-1].append(number)
        else:
            parts.append([number])
    texts = ["-".join(f"{end:0{width}}" for end in dict.fromkeys((part[0], part[-1]))) for part in parts]
    return f"[{','.join(texts)}]"


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["n", "gpu-", "rack1.", ""]),
            st.lists(st.integers(0, 1200), min_size=1, max_size=12),
            st.integers(1, 5),
            st.sampled_from(["", ".x", "-ib"]),
        ),
        min_size=1,
        max_size=4,
    ),
    st.randoms(use_true_random=False),
)
def test_what_is_compressed_expands_to_the_same(groups: list[Any], randomly: random.Random) -> None:
    names = [f"{stem}{n:0{width}}{end}" for stem, numbers, width, end in groups for n in numbers]
    texts = [f"{stem}{compress(numbers, width, randomly)}{end}" for stem, numbers, width, end in groups]
    assert expand_hosts(",".join(texts), "X") == tuple(names)
