"""How the ranks reach each other: the variables for the machine's network, and the reasons."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest

from shoal_toolkit.files import read_table
from shoal_toolkit.job import contract
from shoal_toolkit.job.devices import Nic
from shoal_toolkit.job.launchers import LAUNCHERS, Launcher
from shoal_toolkit.job.machine import Machine, read_instance
from shoal_toolkit.plan import fabric
from shoal_toolkit.plan.fabric import NetworkChoice

from .conftest import Run, Tree

NOTHING: Mapping[str, str] = {}
MACHINE = Machine(cpus=4, gpus=0, interface="eth0", interface_note="interface eth0: why", python="p", mpirun="m")
EFA = Nic("efa_0", "efa", "0xefa1", usable=True)
FIRST_EFA = EFA._replace(device="0xefa0")
ROCE = Nic("mlx5_0", "mlx5_core", "0x101b", usable=True)
P4D, P3DN, P3, P5 = "ml.p4d.24xlarge", "ml.p3dn.24xlarge", "ml.p3.16xlarge", "ml.p5.48xlarge"
ON_EFA = {"FI_PROVIDER": "efa", "RDMAV_FORK_SAFE": "1", "NCCL_PROTO": "simple"}
RDMA = {"FI_EFA_USE_DEVICE_RDMA": "1"}


def chosen(
    tree: Tree,
    machine: Machine = MACHINE,
    part: Launcher = LAUNCHERS["process"],
    instance_type: str = "local",
    hosts: int = 2,
    environ: Mapping[str, str] = NOTHING,
) -> NetworkChoice:
    tree.script("")
    tree.hosts("algo-1", *(f"algo-{n + 1}" for n in range(hosts)), current_instance_type=instance_type)
    paths = contract.Paths(str(tree.base))
    cluster = contract.read_cluster(paths, "box")
    job = contract.read_job(paths, cluster, {"SAGEMAKER_PROGRAM": "train.py", **environ}, ())
    return fabric.choose_network_variables(job, machine._replace(instance=read_instance(job.instance_type)), part)


def efa(variables: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name in {**ON_EFA, **RDMA}}


@pytest.mark.parametrize(
    ("nics", "instance_type", "variables", "why"),
    [
        ((EFA,), P4D, {**ON_EFA, **RDMA}, "network: EFA: efa_0 (efa) under /sys/class/infiniband"),
        ((EFA,), "local", {**ON_EFA, **RDMA}, "network: EFA: efa_0 (efa) under /sys/class/infiniband"),
        ((EFA,), P3DN, ON_EFA, "network: EFA: efa_0 (efa) under /sys/class/infiniband"),
        ((FIRST_EFA,), P4D, ON_EFA, "network: EFA: efa_0 (efa) under /sys/class/infiniband"),
        (
            (),
            P4D,
            {},
            f"network: instance type {P4D} has EFA, but this machine has no device under /sys/class/infiniband: "
            "plain TCP",
        ),
        (
            (EFA._replace(usable=False),),
            P4D,
            {},
            "network: efa_0 (efa) is under /sys/class/infiniband, but this container does not have its node in "
            "/dev/infiniband (docker run --device): plain TCP",
        ),
        ((), P3, {}, "network: no device under /sys/class/infiniband: plain TCP"),
        ((), "ml.unheard.of", {}, "network: no device under /sys/class/infiniband: plain TCP"),
        (
            (ROCE,),
            "local",
            {},
            "network: InfiniBand or RoCE, if NCCL can use it: mlx5_0 (mlx5_core) under /sys/class/infiniband",
        ),
    ],
)
def test_efa_is_used_where_the_machine_has_it(
    tree: Tree, nics: tuple[Nic, ...], instance_type: str, variables: dict[str, str], why: str
) -> None:
    """On a host without EFA, FI_PROVIDER=efa makes a job hang or fail: the table of types alone never decides."""
    found = chosen(tree, MACHINE._replace(nics=nics, gpus=8), instance_type=instance_type)
    assert efa(dict(found.variables)) == variables
    assert [text for text in (*found.notes, *found.reasons) if text.startswith("network:")] == [why]
    missing = "but this" in why
    assert (why in found.notes) == missing, "only what is missing is worth a line in every job's log"


def test_nccl_leaves_infiniband_alone_unless_it_is_there(tree: Tree) -> None:
    assert chosen(tree).variables["NCCL_IB_DISABLE"] == "1"
    assert chosen(tree, MACHINE._replace(nics=(EFA,))).variables["NCCL_IB_DISABLE"] == "1"
    assert "NCCL_IB_DISABLE" not in chosen(tree, MACHINE._replace(nics=(ROCE,))).variables


@pytest.mark.parametrize(
    ("part", "debug", "rings"),
    [
        ("process", "WARN", None),
        ("torch_distributed", "WARN", None),
        ("mpi", "INFO", "4"),
        ("smdataparallel", "INFO", None),
    ],
)
def test_nccl_logs_as_much_as_in_the_stock_toolkit(tree: Tree, part: str, debug: str, rings: str | None) -> None:
    variables = chosen(tree, part=LAUNCHERS[part]).variables
    assert (variables["NCCL_DEBUG"], variables.get("NCCL_MIN_NRINGS")) == (debug, rings)


def test_variables_of_the_user_stay_and_are_reported(tree: Tree) -> None:
    """The stock PyTorch toolkit overwrites it."""
    own = {"NCCL_DEBUG": "TRACE", "NCCL_SOCKET_IFNAME": "ens", "NCCL_IB_DISABLE": "0", "FI_PROVIDER": "tcp"}
    found = chosen(tree, MACHINE._replace(nics=(EFA,)), environ=own)
    assert not set(own) & set(found.variables)
    assert "NCCL_DEBUG stays 'TRACE', as you set it" in found.reasons


@pytest.mark.parametrize(
    ("hosts", "replaced", "names"),
    [
        (2, False, {"NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"}),
        (2, True, {"NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"}),
        (1, False, {"NCCL_SOCKET_IFNAME"}),
        (1, True, set()),
    ],
)
def test_the_interface_is_named_where_hosts_must_meet(tree: Tree, hosts: int, replaced: bool, names: set[str]) -> None:
    found = chosen(tree, MACHINE._replace(interface_replaced=replaced), hosts=hosts)
    assert {name for name in found.variables if name.endswith("_IFNAME")} == names
    assert {found.variables[name] for name in names} <= {"eth0"}
    assert "interface eth0: why" in found.reasons


@pytest.mark.parametrize(
    ("instance_type", "gpus", "environ", "notes"),
    [
        (P4D, 4, {}, [f"instance type {P4D} has 8 GPUs, but 4 are visible"]),
        (P4D, 4, {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, []),
        (P4D, 8, {}, []),
        (P5, 0, {}, [f"instance type {P5} has 8 GPUs, but 0 are visible"]),
        ("local", 3, {}, []),
        ("ml.m5.large", 0, {}, []),
    ],
)
def test_gpus_that_are_missing_are_noticed(
    tree: Tree, instance_type: str, gpus: int, environ: dict[str, str], notes: list[str]
) -> None:
    found = chosen(tree, MACHINE._replace(gpus=gpus), instance_type=instance_type, hosts=1, environ=environ)
    assert list(found.notes) == notes


def test_the_type_may_come_with_the_hyperparameters(tree: Tree) -> None:
    tree.hyperparameters(sagemaker_instance_type=P4D)
    assert any(P4D in note for note in chosen(tree).notes)


def test_the_table_of_instance_types() -> None:
    table = read_table("instances")["instances"]
    assert {name for name, known in table.items() if known.get("rdma") and not known.get("efa")} == set()
    facts = {"ml.p3.2xlarge": 1, "ml.p3.8xlarge": 4, "ml.p3.16xlarge": 8, P3DN: 8, P4D: 8, "ml.p4de.24xlarge": 8, P5: 8}
    assert {name: table[name]["gpus"] for name in facts} == facts


def test_explain_prints_the_reason(tree: Tree, run: Run) -> None:
    tree.script("")
    tree.hosts("algo-1", "algo-1", current_instance_type=P4D, network_interface_name="lo")
    done = run("--explain", "--json", SAGEMAKER_PROGRAM="train.py", NCCL_DEBUG="TRACE")
    explained = json.loads(done.out)
    notes = explained["notes"]
    assert "interface lo: network_interface_name (default eth0) names it, and it exists" in notes
    assert any(note.startswith("network: ") for note in notes)
    assert "NCCL_DEBUG stays 'TRACE', as you set it" in notes
    assert explained["environment"]["NCCL_IB_DISABLE"] == "1"
    assert (
        "why          interface lo: network_interface_name (default eth0) names it"
        in run("--explain", SAGEMAKER_PROGRAM="train.py").out
    )
