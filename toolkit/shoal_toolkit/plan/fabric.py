"""Chooses the variables of NCCL, gloo and EFA for this machine, each with a reason.

The hardware decides: a device under /sys/class/infiniband with a device node in this container. FI_PROVIDER=efa without
EFA would make a job hang or fail. The table of instance types (data/instances.json) only shows what is missing.
Variables that the user has set are kept.

Sources: the stock PyTorch toolkit sets NCCL_SOCKET_IFNAME, NCCL_IB_DISABLE=1 and NCCL_DEBUG=WARN. Its runners under
mpirun set NCCL_DEBUG=INFO, NCCL_MIN_NRINGS=4 and the four variables of EFA. NCCL_PROTO=simple: EFA delivers out of
order.
RDMAV_FORK_SAFE: data loaders fork. FI_EFA_USE_DEVICE_RDMA: the first cards (PCI device efa0) don't support it.
"""

from __future__ import annotations

from collections.abc import Mapping

from shoal_toolkit.fast_typing import TYPE_CHECKING, Any, NamedTuple
from shoal_toolkit.job.contract import Job
from shoal_toolkit.job.launchers import BY_MPIRUN, MPI, Launcher
from shoal_toolkit.job.machine import Machine

if TYPE_CHECKING:  # most machines have none
    from shoal_toolkit.job.devices import Nic

_SYSFS = "/sys/class/infiniband"
_NO_RDMA = "0xefa0"


class NetworkChoice(NamedTuple):
    """The network variables of a host, and why they are chosen."""

    variables: Mapping[str, str]
    notes: tuple[str, ...]  # for the log: hardware is missing
    reasons: tuple[str, ...]  # for `train --explain`


def choose_network_variables(job: Job, machine: Machine, launcher: Launcher) -> NetworkChoice:
    """Returns the variables with which the ranks of this host reach the others, without those that the user has set.

    Args:
        job: The job.
        machine: This host's machine.
        launcher: The launcher on this host.
    """
    several = len(job.cluster.hosts) > 1
    known = machine.instance
    cards, missing, reason = _find_cards(job.instance_type, machine)
    variables = _nccl_variables(machine, launcher, several)
    if any(card.driver == "efa" for card in cards):
        variables.update(_efa_variables(cards, known))
    if not cards or variables.get("FI_PROVIDER"):
        variables["NCCL_IB_DISABLE"] = "1"
    kept = sorted(name for name in variables if name in job.environ)
    gpus = _compare_gpus(job, machine)
    reasons = [machine.interface_note, reason, *(f"{name} stays {job.environ[name]!r}, as you set it" for name in kept)]
    return NetworkChoice(
        variables={name: value for name, value in variables.items() if name not in job.environ},
        notes=(*([reason] if missing and several else []), *gpus),
        reasons=tuple(text for text in reasons if not (text == reason and missing and several)),
    )


def _nccl_variables(machine: Machine, launcher: Launcher, several: bool) -> dict[str, str]:
    variables = {"NCCL_DEBUG": "INFO" if launcher.ranks == BY_MPIRUN else "WARN"}
    if launcher is MPI:
        variables["NCCL_MIN_NRINGS"] = "4"
    if several:
        variables["GLOO_SOCKET_IFNAME"] = machine.interface
    if several or not machine.interface_replaced:
        variables["NCCL_SOCKET_IFNAME"] = machine.interface
    return variables


def _efa_variables(cards: tuple[Nic, ...], known: Mapping[str, Any]) -> dict[str, str]:
    """Returns the variables for EFA; RDMA only if the instance type, if known, and all cards support it."""
    variables = {"FI_PROVIDER": "efa", "RDMAV_FORK_SAFE": "1", "NCCL_PROTO": "simple"}
    if known.get("rdma", not known) and all(card.device != _NO_RDMA for card in cards):
        variables["FI_EFA_USE_DEVICE_RDMA"] = "1"
    return variables


def _find_cards(instance_type: str, machine: Machine) -> tuple[tuple[Nic, ...], bool, str]:
    """Returns the network cards to use, whether one is missing, and the reason."""
    usable = tuple(card for card in machine.nics if card.usable)
    names = ", ".join(f"{card.name} ({card.driver or 'no driver'})" for card in usable or machine.nics)
    if usable:
        what = "EFA" if any(card.driver == "efa" for card in usable) else "InfiniBand or RoCE, if NCCL can use it"
        return usable, False, f"network: {what}: {names} under {_SYSFS}"
    if machine.nics:
        reason = f"network: {names} is under {_SYSFS}, but this container does not have its node in /dev/infiniband"
        return (), True, f"{reason} (docker run --device): plain TCP"
    if machine.instance.get("efa"):
        reason = f"network: instance type {instance_type} has EFA, but this machine has no device under {_SYSFS}"
        return (), True, f"{reason}: plain TCP"
    return (), False, f"network: no device under {_SYSFS}: plain TCP"


def _compare_gpus(job: Job, machine: Machine) -> list[str]:
    gpus = machine.instance.get("gpus", machine.gpus)
    if gpus == machine.gpus or "CUDA_VISIBLE_DEVICES" in job.environ:
        return []
    return [f"instance type {job.instance_type} has {gpus} GPUs, but {machine.gpus} are visible"]
