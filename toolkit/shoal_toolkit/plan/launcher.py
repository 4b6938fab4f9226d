"""Which launcher a job asks for, on which hosts it distributes, and how many ranks each of them has. Pure.

Sources: the estimators of the SageMaker SDK write one hyperparameter for each launcher; their order of precedence is
that of the stock framework toolkits.
"""

from __future__ import annotations

from collections.abc import Mapping

from shoal_toolkit.errors import ContractError, did_you_mean
from shoal_toolkit.job.contract import Cluster, Job, flag, whole_number
from shoal_toolkit.job.machine import Machine

PROCESS, MPI, DATAPARALLEL, PYTORCH_DDP = "process", "mpi", "smdataparallel", "pytorchddp"
TORCH_DISTRIBUTED = "torch_distributed"
PARAMETER_SERVER, MULTI_WORKER_MIRRORED = "parameter_server", "multi_worker_mirrored_strategy"

# The hyperparameter that asks for a launcher; the first that is true counts.
ASKED_BY = {
    "sagemaker_mpi_enabled": MPI,
    "sagemaker_pytorch_ddp_enabled": PYTORCH_DDP,
    "sagemaker_torch_distributed_enabled": TORCH_DISTRIBUTED,
    "sagemaker_distributed_dataparallel_enabled": DATAPARALLEL,
    "sagemaker_multi_worker_mirrored_strategy_enabled": MULTI_WORKER_MIRRORED,
    "sagemaker_parameter_server_enabled": PARAMETER_SERVER,
}
_UNSUPPORTED = {"sagemaker_pytorch_xla_multi_worker_enabled": "pytorchxla (AWS Trainium)"}
BY_MPIRUN = frozenset({MPI, DATAPARALLEL, PYTORCH_DDP})
# Several ranks a host; the others run the script once on each.
SEVERAL_RANKS = BY_MPIRUN | {TORCH_DISTRIBUTED}
# The hyperparameters that tune launchers, and which of them.
_TUNES = {
    "sagemaker_mpi_num_of_processes_per_host": SEVERAL_RANKS,
    "sagemaker_mpi_num_processes": BY_MPIRUN,
    "sagemaker_mpi_custom_mpi_options": frozenset({MPI}),
    "sagemaker_distributed_dataparallel_custom_mpi_options": BY_MPIRUN - {MPI},
}


def choose(job: Job, machine: Machine) -> tuple[str, list[str]]:
    """Return the launcher, why, and what was asked for in vain. Raises ContractError for one that is not supported."""
    chosen, why = _chosen(job, machine)
    in_vain = [
        f"{key} has no effect: it is for {', '.join(sorted(launchers))}, and the launcher is {chosen}"
        for key, launchers in _TUNES.items()
        if job.framework.get(key) and chosen not in launchers
    ]
    return chosen, why + in_vain


def _chosen(job: Job, machine: Machine) -> tuple[str, list[str]]:
    """Return the launcher, and why. Raises ContractError for one that is not supported."""
    for key, name in _UNSUPPORTED.items():
        if flag(job.framework, key):
            raise ContractError(
                f"hyperparameters.json: {key} asks for the launcher {name}, which is not supported. "
                f"Supported are {', '.join(ASKED_BY)}."
            )
    asked = [key for key in ASKED_BY if flag(job.framework, key)]
    if asked:
        why = [f"launcher {ASKED_BY[asked[0]]}: {asked[0]} is true"]
        return ASKED_BY[asked[0]], why + [f"{key} is true as well, and is ignored" for key in asked[1:]]
    if not job.configured and machine.gpus > 1 and len(job.cluster.hosts) == 1:
        return MPI, [f"launcher mpi: no hyperparameters.json and {machine.gpus} GPUs: one process for each"]
    return PROCESS, ["launcher process: no distribution is asked for"]


def members(cluster: Cluster, framework: Mapping[str, object]) -> tuple[str, ...]:
    """Return the hosts that take part in the distribution, the first of which leads the job.

    All hosts, unless sagemaker_distribution_instance_groups names some of the instance groups: then those of these
    groups, in the order of `hosts`. Raises ContractError for a group that resourceconfig.json does not have.
    """
    named = framework.get("sagemaker_distribution_instance_groups")
    groups = {str(group.get("instance_group_name")): group.get("hosts", []) for group in cluster.instance_groups}
    if not named or not groups:
        return cluster.hosts
    if not isinstance(named, list):
        raise ContractError(
            f"hyperparameters.json: sagemaker_distribution_instance_groups is {named!r}; it must be a list of instance "
            f"groups, some of {list(groups)}."
        )
    for name in named:
        if name not in groups:
            raise ContractError(
                f"hyperparameters.json: sagemaker_distribution_instance_groups names {name!r}, and resourceconfig.json "
                f"has the instance groups {list(groups)}.{did_you_mean(str(name), groups)}"
            )
    taking_part = {host for name in named for host in groups[name]}
    return tuple(host for host in cluster.hosts if host in taking_part) or cluster.hosts


def ranks(job: Job, machine: Machine, launcher: str, hosts: tuple[str, ...]) -> dict[str, int]:
    """Return how many ranks each of these hosts has, filled in order."""
    if launcher not in SEVERAL_RANKS:
        return dict.fromkeys(hosts, 1)
    asked = whole_number(job.framework, "sagemaker_mpi_num_of_processes_per_host")
    per_host = asked or machine.gpus or 1
    if machine.gpus and per_host > machine.gpus:
        raise ContractError(
            f"The number of node-local MPI processes {per_host} cannot be larger than the device count {machine.gpus}. "
            f"Set sagemaker_mpi_num_of_processes_per_host to at most {machine.gpus}."
        )
    most = per_host * len(hosts)
    total = most
    if launcher in BY_MPIRUN:
        total = whole_number(job.framework, "sagemaker_mpi_num_processes") or most
    if total > most:
        raise ContractError(
            f"sagemaker_mpi_num_processes is {total}, and {len(hosts)} hosts of {per_host} processes hold "
            f"{most}. Raise sagemaker_mpi_num_of_processes_per_host."
        )
    counts = {host: max(0, min(per_host, total - index * per_host)) for index, host in enumerate(hosts)}
    return {host: count for host, count in counts.items() if count}
