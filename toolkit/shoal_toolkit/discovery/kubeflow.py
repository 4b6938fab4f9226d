"""Kubeflow: the pods of a TrainJob or of a PyTorchJob with torchrun, from the PET_* variables.

PyTorch defines these variables as defaults of torchrun's options (torch.distributed.run, PET_<option>). Kubeflow
Trainer sets PET_NNODES, PET_NPROC_PER_NODE, PET_NODE_RANK, PET_MASTER_ADDR (<job>-node-0-0.<job>) and PET_MASTER_PORT
("PyTorch Guide" of Kubeflow Trainer). Kubeflow's training operator sets them for a PyTorchJob with nprocPerNode.
"""

from __future__ import annotations

from collections.abc import Mapping

from shoal_toolkit.discovery.host_list import HostList, require, show
from shoal_toolkit.discovery.kubeflow_v1 import name_replicas
from shoal_toolkit.discovery.kubernetes import SECRET, number_names
from shoal_toolkit.errors import ContractError

_SOURCE = "Kubeflow"
_VARIABLES = ("PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR")


def find(environ: Mapping[str, str], hostname: str, root: str) -> HostList | None:
    """Returns the pods of the job.

    Raises:
        ContractError: If their number may change, a variable is missing or wrong, or the first name lacks -0.
    """
    if ":" in environ.get("PET_NNODES", ""):
        raise ContractError(
            f"{_SOURCE}: {show(environ, 'PET_NNODES')} is an elastic job. `train` needs a fixed number of hosts. Fix: "
            "remove elasticPolicy, or make minReplicas and maxReplicas equal."
        )
    count = require(environ, "PET_NNODES", _SOURCE, 1)
    if count == 1:
        return HostList(_SOURCE, (hostname,), 0, show(environ, *_VARIABLES), SECRET)
    rank = require(environ, "PET_NODE_RANK", _SOURCE)
    first = environ.get("PET_MASTER_ADDR") or environ.get("MASTER_ADDR", "")
    hosts = name_replicas(first, count, hostname) or number_names(first, count, _SOURCE)
    return HostList(_SOURCE, hosts, rank, show(environ, *_VARIABLES), SECRET)
