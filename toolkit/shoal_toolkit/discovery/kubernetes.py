"""Sources of hosts on Kubernetes: Kubeflow's jobs, the MPI Operator, and Indexed Jobs.

Each part cites the documentation of its variables.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from shoal_toolkit.discovery.host_list import HostList
from shoal_toolkit.discovery.sources import EXPLICIT, require, show
from shoal_toolkit.errors import ContractError
from shoal_toolkit.files import read_text

SECRET = (
    "On Kubernetes, mount a Secret as a volume with `defaultMode: 0440` and an fsGroup of the pod's user, and set "
    "SHOAL_JOB_SECRET_FILE to its file: "
    "`shoal deploy kubernetes` writes that."
)


def number_names(first: str, count: int, source: str) -> tuple[str, ...]:
    """Returns the names of pods that differ in their number: train-node-0-0.train → …-0-0.train, …-0-1.train, …

    Args:
        first: The DNS name of the first one.

    Raises:
        ContractError: If the first label of the name does not end in -0.
    """
    label, dot, domain = first.partition(".")
    if not label.endswith("-0"):
        raise ContractError(
            f"{source}: the name of the first host is {first!r}, which does not end in -0. So the names of the other "
            f"{count - 1} hosts are unknown. Fix: set SHOAL_HOSTS and SHOAL_HOST_RANK on every host."
        )
    return tuple(f"{label[:-1]}{number}{dot}{domain}" for number in range(count))


# Kubeflow: the pods of a PyTorchJob, from MASTER_ADDR, WORLD_SIZE and RANK.
#
# Kubeflow's training operator sets these variables. It makes a headless service for each pod with the pod's name:
# <job>-master-0, <job>-worker-0, <job>-worker-1. See "PyTorch Training (PyTorchJob)" in Kubeflow's documentation. The
# master has the rank 0, and the first worker the rank 1. With nprocPerNode, the PET_* variables count: see `kubeflow`.
# Kubernetes sets KUBERNETES_SERVICE_HOST in every container: elsewhere a host may have such a name by chance.

_KUBEFLOW = "Kubeflow"
_MASTER = "-master-0"


def find_kubeflow_v1(environ: Mapping[str, str], hostname: str, root: str) -> HostList | None:
    """Returns the pods of the job; None if MASTER_ADDR is not of a PyTorchJob. Raises ContractError if one is wrong."""
    first = environ.get("MASTER_ADDR", "")
    if environ.get("PET_NNODES") or not environ.get("KUBERNETES_SERVICE_HOST") or not name_replicas(first, 1, hostname):
        return None
    count = require(environ, "WORLD_SIZE", _KUBEFLOW, 1)
    hosts = name_replicas(first, count, hostname)
    rank = require(environ, "RANK", _KUBEFLOW)
    return HostList(_KUBEFLOW, hosts, rank, show(environ, "MASTER_ADDR", "WORLD_SIZE", "RANK"), SECRET)


def name_replicas(first: str, count: int, hostname: str) -> tuple[str, ...]:
    """Returns the names of a PyTorchJob's pods; empty if the first one is not a master by its name.

    Args:
        first: The address of the master. Older operators write "localhost" into the master's own pod.
    """
    first = hostname if first == "localhost" else first
    label, dot, domain = first.partition(".")
    if not label.endswith(_MASTER):
        return ()
    job = label[: -len(_MASTER)]
    return (first, *(f"{job}-worker-{number}{dot}{domain}" for number in range(count - 1)))


# Kubeflow: the pods of a TrainJob or of a PyTorchJob with torchrun, from the PET_* variables.
#
# PyTorch defines these variables as defaults of torchrun's options (torch.distributed.run, PET_<option>). Kubeflow
# Trainer sets PET_NNODES, PET_NPROC_PER_NODE, PET_NODE_RANK, PET_MASTER_ADDR (<job>-node-0-0.<job>) and PET_MASTER_PORT
# ("PyTorch Guide" of Kubeflow Trainer). Kubeflow's training operator sets them for a PyTorchJob with nprocPerNode.

_VARIABLES = ("PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR")


def find_kubeflow(environ: Mapping[str, str], hostname: str, root: str) -> HostList | None:
    """Returns the pods of the job.

    Raises:
        ContractError: If their number may change, a variable is missing or wrong, or the first name lacks -0.
    """
    if ":" in environ.get("PET_NNODES", ""):
        raise ContractError(
            f"{_KUBEFLOW}: {show(environ, 'PET_NNODES')} is an elastic job. `train` needs a fixed number of hosts. "
            "Fix: remove elasticPolicy, or make minReplicas and maxReplicas equal."
        )
    count = require(environ, "PET_NNODES", _KUBEFLOW, 1)
    if count == 1:
        return HostList(_KUBEFLOW, (hostname,), 0, show(environ, *_VARIABLES), SECRET)
    rank = require(environ, "PET_NODE_RANK", _KUBEFLOW)
    first = environ.get("PET_MASTER_ADDR") or environ.get("MASTER_ADDR", "")
    hosts = name_replicas(first, count, hostname) or number_names(first, count, _KUBEFLOW)
    return HostList(_KUBEFLOW, hosts, rank, show(environ, *_VARIABLES), SECRET)


# Kubeflow's MPI Operator: the pods in its hostfile.
#
# In the launcher, the operator mounts the hostfile at /etc/mpi/hostfile and names it in OMPI_MCA_orte_default_hostfile.
# K_MPI_JOB_ROLE is "launcher" or "worker" in each pod. See "MPI Training (MPIJob)" in Kubeflow's documentation, and the
# MPI Operator's API v2beta1. A line is `<host> slots=<n>` for Open MPI, `<host>:<n>` for MPICH and Intel MPI. With
# `runLauncherAsWorker` the launcher is the first line.

_OPERATOR = "MPI Operator"
_HOSTFILE = "/etc/mpi/hostfile"


def find_mpi_operator(environ: Mapping[str, str], hostname: str, root: str) -> HostList | None:
    """Returns the hosts of the hostfile. Raises ContractError if there is none, or this pod is not in it."""
    path = environ.get("OMPI_MCA_orte_default_hostfile") or _HOSTFILE
    lines = [line.partition("#")[0].split() for line in read_text(os.path.join(root, path.lstrip("/"))).splitlines()]
    hosts = tuple(words[0].partition(":")[0] for words in lines if words)
    if not hosts:
        raise ContractError(
            f"{_OPERATOR}: {path} is missing or names no hosts. The operator mounts it in the launcher only. Fix: "
            "mount the ConfigMap <job>-config at /etc/mpi in the workers too (`shoal deploy kubernetes` writes that), "
            f"or {EXPLICIT}."
        )
    short = hostname.partition(".")[0]
    ranks = [rank for rank, host in enumerate(hosts) if host.partition(".")[0] == short]
    if not ranks:
        raise ContractError(
            f"{_OPERATOR}: this pod {hostname} is not in {path}, which lists {', '.join(hosts)}. `train` runs on the "
            "listed pods only. Fix: set runLauncherAsWorker: true in the MPIJob, and run `train` in the launcher and "
            "in the workers."
        )
    return HostList(_OPERATOR, hosts, ranks[0], f"{path}, this host is {hostname}", SECRET)


# Kubernetes: an Indexed Job, also one of a JobSet, if its manifest does not name the hosts.
#
# Kubernetes sets JOB_COMPLETION_INDEX in each pod, but neither the number of pods nor their service. See "Indexed Job
# for Parallel Processing with Static Work Assignment" in its documentation. The pods of an Indexed Job have the host
# names <job>-<index> ("Job with Pod-to-Pod Communication"), pods of a JobSet <jobset>-<job>-<number>-<index>.


def find_indexed_job(environ: Mapping[str, str], hostname: str, root: str) -> HostList | None:
    """Returns None if another source names the hosts. Raises ContractError otherwise: the job may have more pods."""
    if environ.get("SHOAL_HOSTS") or environ.get("PET_NNODES"):
        return None
    stem = hostname.rpartition("-")[0] or "<job>"
    raise ContractError(
        f"Kubernetes: this pod is one of an Indexed Job ({show(environ, 'JOB_COMPLETION_INDEX')}), and nothing says "
        "how many pods there are and how they reach each other. Fix: set SHOAL_HOSTS to the names of all pods, for "
        f"example {stem}-[0-3].<headless service> for 4 pods; `shoal deploy kubernetes` writes that. If each pod "
        "trains on its own, set SHOAL_HOSTS=localhost and SHOAL_HOST_RANK=0."
    )
