"""Kubeflow's MPI Operator: the pods in its hostfile.

In the launcher, the operator mounts the hostfile at /etc/mpi/hostfile and names it in OMPI_MCA_orte_default_hostfile.
K_MPI_JOB_ROLE is "launcher" or "worker" in each pod. See "MPI Training (MPIJob)" in Kubeflow's documentation, and the
MPI Operator's API v2beta1. A line is `<host> slots=<n>` for Open MPI, `<host>:<n>` for MPICH and Intel MPI. With
`runLauncherAsWorker` the launcher is the first line.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from shoal_toolkit.discovery.host_list import EXPLICIT, HostList
from shoal_toolkit.discovery.kubernetes import SECRET
from shoal_toolkit.errors import ContractError
from shoal_toolkit.system.files import read_text

_SOURCE = "MPI Operator"
_HOSTFILE = "/etc/mpi/hostfile"


def find(environ: Mapping[str, str], hostname: str, root: str) -> HostList | None:
    """Returns the hosts of the hostfile. Raises ContractError if there is none, or this pod is not in it."""
    path = environ.get("OMPI_MCA_orte_default_hostfile") or _HOSTFILE
    lines = [line.partition("#")[0].split() for line in read_text(os.path.join(root, path.lstrip("/"))).splitlines()]
    hosts = tuple(words[0].partition(":")[0] for words in lines if words)
    if not hosts:
        raise ContractError(
            f"{_SOURCE}: {path} is missing or names no hosts. The operator mounts it in the launcher only. Fix: mount "
            f"the ConfigMap <job>-config at /etc/mpi in the workers too (`shoal deploy kubernetes` writes that), or "
            f"{EXPLICIT}."
        )
    short = hostname.partition(".")[0]
    ranks = [rank for rank, host in enumerate(hosts) if host.partition(".")[0] == short]
    if not ranks:
        raise ContractError(
            f"{_SOURCE}: this pod {hostname} is not in {path}, which lists {', '.join(hosts)}. `train` runs on the "
            "listed pods only. Fix: set runLauncherAsWorker: true in the MPIJob, and run `train` in the launcher and "
            "in the workers."
        )
    return HostList(_SOURCE, hosts, ranks[0], f"{path}, this host is {hostname}", SECRET)
