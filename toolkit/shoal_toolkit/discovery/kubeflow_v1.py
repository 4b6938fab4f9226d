"""Kubeflow: the pods of a PyTorchJob, from MASTER_ADDR, WORLD_SIZE and RANK.

Kubeflow's training operator sets these variables. It makes a headless service for each pod with the pod's name:
<job>-master-0, <job>-worker-0, <job>-worker-1. See "PyTorch Training (PyTorchJob)" in Kubeflow's documentation. The
master has the rank 0, and the first worker the rank 1. With nprocPerNode, the PET_* variables count: see `kubeflow`.
Kubernetes sets KUBERNETES_SERVICE_HOST in every container: elsewhere a host may have such a name by chance.
"""

from __future__ import annotations

from collections.abc import Mapping

from shoal_toolkit.discovery.host_list import HostList, require, show
from shoal_toolkit.discovery.kubernetes import SECRET

_SOURCE = "Kubeflow"
_MASTER = "-master-0"


def find(environ: Mapping[str, str], hostname: str, root: str) -> HostList | None:
    """Returns the pods of the job; None if MASTER_ADDR is not of a PyTorchJob. Raises ContractError if one is wrong."""
    first = environ.get("MASTER_ADDR", "")
    if environ.get("PET_NNODES") or not environ.get("KUBERNETES_SERVICE_HOST") or not name_replicas(first, 1, hostname):
        return None
    count = require(environ, "WORLD_SIZE", _SOURCE, 1)
    hosts = name_replicas(first, count, hostname)
    rank = require(environ, "RANK", _SOURCE)
    return HostList(_SOURCE, hosts, rank, show(environ, "MASTER_ADDR", "WORLD_SIZE", "RANK"), SECRET)


def name_replicas(first: str, count: int, hostname: str) -> tuple[str, ...]:
    """Returns the names of a PyTorchJob's pods; empty if the first one is not a master by its name.

    Args:
        first: The address of the master. Older operators write "localhost" into the master's own pod.
        count: The number of pods.
        hostname: The name of this pod.
    """
    first = hostname if first == "localhost" else first
    label, dot, domain = first.partition(".")
    if not label.endswith(_MASTER):
        return ()
    job = label[: -len(_MASTER)]
    return (first, *(f"{job}-worker-{number}{dot}{domain}" for number in range(count - 1)))
