"""How the ranks reach each other: the variables of NCCL, gloo and EFA for this machine, each choice with its reason.

What the machine has decides (a device under /sys/class/infiniband whose node this container was given): FI_PROVIDER=efa
without EFA makes a job hang or fail. The table of instance types (data/instances.json) is a hint, and says what is
missing. What the user has set stays.

Sources: the stock PyTorch toolkit sets NCCL_SOCKET_IFNAME, NCCL_IB_DISABLE=1 and NCCL_DEBUG=WARN, its runners under
mpirun NCCL_DEBUG=INFO, NCCL_MIN_NRINGS=4 and the four of EFA. NCCL_PROTO=simple: EFA delivers out of order.
RDMAV_FORK_SAFE: data loaders fork. FI_EFA_USE_DEVICE_RDMA: not on the first cards (PCI device efa0), which cannot.
"""

from __future__ import annotations

from collections.abc import Mapping

from shoal_toolkit.job.contract import Job
from shoal_toolkit.job.machine import Machine, Nic
from shoal_toolkit.light_typing import Any, NamedTuple
from shoal_toolkit.plan.launcher import BY_MPIRUN, MPI
from shoal_toolkit.tables import read_table

_SYSFS = "/sys/class/infiniband"
_NO_RDMA = "0xefa0"


class Fabric(NamedTuple):
    """`notes` are for the log: something is missing. `reasons` are for `train --explain`."""

    variables: Mapping[str, str]
    notes: tuple[str, ...]
    reasons: tuple[str, ...]


def choose(job: Job, machine: Machine, part: str) -> Fabric:
    """Return what a host of a job sets. `part`: the launcher there."""
    several = len(job.cluster.hosts) > 1
    instance_type = instance_type_of(job)
    known = instance(instance_type)
    cards, missing, reason = _cards(instance_type, known, machine)
    variables = _nccl(machine, part, several)
    if any(card.driver == "efa" for card in cards):
        variables.update(_efa(cards, known))
    if not cards or variables.get("FI_PROVIDER"):
        variables["NCCL_IB_DISABLE"] = "1"
    kept = sorted(name for name in variables if name in job.environ)
    gpus = _gpu_note(instance_type, known, machine, job.environ)
    reasons = [machine.interface_note, reason, *(f"{name} stays {job.environ[name]!r}, as it was set" for name in kept)]
    return Fabric(
        variables={name: value for name, value in variables.items() if name not in job.environ},
        notes=(*([reason] if missing and several else []), *gpus),
        reasons=tuple(text for text in reasons if not (text == reason and missing and several)),
    )


def instance_type_of(job: Job) -> str:
    """Return the type of this host's instance, "local" where nothing names it."""
    if job.cluster.instance_type != "local":
        return job.cluster.instance_type
    return str(job.framework.get("sagemaker_instance_type") or "local")


def instance(instance_type: str) -> Mapping[str, Any]:
    """Return what is known of an instance type: nothing for one that is not in the table."""
    if not instance_type.startswith("ml."):
        return {}
    found: Mapping[str, Any] = read_table("instances")["instances"].get(instance_type, {})
    return found


def _nccl(machine: Machine, part: str, several: bool) -> dict[str, str]:
    variables = {"NCCL_DEBUG": "INFO" if part in BY_MPIRUN else "WARN"}
    if part == MPI:
        variables["NCCL_MIN_NRINGS"] = "4"
    if several:
        variables["GLOO_SOCKET_IFNAME"] = machine.interface
    if several or not machine.interface_replaced:
        variables["NCCL_SOCKET_IFNAME"] = machine.interface
    return variables


def _efa(cards: tuple[Nic, ...], known: Mapping[str, Any]) -> dict[str, str]:
    variables = {"FI_PROVIDER": "efa", "RDMAV_FORK_SAFE": "1", "NCCL_PROTO": "simple"}
    if known.get("rdma", not known) and all(card.device != _NO_RDMA for card in cards):
        variables["FI_EFA_USE_DEVICE_RDMA"] = "1"
    return variables


def _cards(instance_type: str, known: Mapping[str, Any], machine: Machine) -> tuple[tuple[Nic, ...], bool, str]:
    """Return the network cards to use, whether any is missing, and why it is these."""
    usable = tuple(card for card in machine.nics if card.usable)
    names = ", ".join(f"{card.name} ({card.driver or 'no driver'})" for card in usable or machine.nics)
    if usable:
        what = "EFA" if any(card.driver == "efa" for card in usable) else "InfiniBand or RoCE, if NCCL can use it"
        return usable, False, f"network: {what}: {names} under {_SYSFS}"
    if machine.nics:
        reason = f"network: {names} is under {_SYSFS}, but this container was not given its node in /dev/infiniband"
        return (), True, f"{reason} (docker run --device): plain TCP"
    if known.get("efa"):
        reason = f"network: instance type {instance_type} has EFA, but this machine has no device under {_SYSFS}"
        return (), True, f"{reason}: plain TCP"
    return (), False, f"network: no device under {_SYSFS}: plain TCP"


def _gpu_note(instance_type: str, known: Mapping[str, Any], machine: Machine, environ: Mapping[str, str]) -> list[str]:
    """Say that GPUs are missing, unless someone has chosen among them."""
    if "gpus" not in known or known["gpus"] == machine.gpus or "CUDA_VISIBLE_DEVICES" in environ:
        return []
    return [f"instance type {instance_type} has {known['gpus']} GPUs, and {machine.gpus} are to be seen here"]
