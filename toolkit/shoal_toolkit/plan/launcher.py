"""Chooses the launcher, the hosts of the distribution, and the number of ranks on each.

Sources: the estimators of the SageMaker SDK set one hyperparameter for each launcher. Their precedence is the same as
in the stock framework toolkits.
"""

from __future__ import annotations

from collections.abc import Mapping

from shoal_toolkit.errors import ContractError, did_you_mean
from shoal_toolkit.job.contract import Cluster, Job, read_count, read_flag
from shoal_toolkit.job.machine import Machine

PROCESS, MPI, DATAPARALLEL, PYTORCH_DDP = "process", "mpi", "smdataparallel", "pytorchddp"
TORCH_DISTRIBUTED = "torch_distributed"
PARAMETER_SERVER, MULTI_WORKER_MIRRORED = "parameter_server", "multi_worker_mirrored_strategy"

# The hyperparameter that selects a launcher. The first that is true counts.
LAUNCHER_OF = {
    "sagemaker_mpi_enabled": MPI,
    "sagemaker_pytorch_ddp_enabled": PYTORCH_DDP,
    "sagemaker_torch_distributed_enabled": TORCH_DISTRIBUTED,
    "sagemaker_distributed_dataparallel_enabled": DATAPARALLEL,
    "sagemaker_multi_worker_mirrored_strategy_enabled": MULTI_WORKER_MIRRORED,
    "sagemaker_parameter_server_enabled": PARAMETER_SERVER,
}
_UNSUPPORTED = {"sagemaker_pytorch_xla_multi_worker_enabled": "pytorchxla (AWS Trainium)"}
BY_MPIRUN = frozenset({MPI, DATAPARALLEL, PYTORCH_DDP})
# These start several ranks per host; the others run the script once on each.
SEVERAL_RANKS = BY_MPIRUN | {TORCH_DISTRIBUTED}
# Hyperparameters that tune launchers → the launchers.
_TUNES = {
    "sagemaker_mpi_num_of_processes_per_host": SEVERAL_RANKS,
    "sagemaker_mpi_num_processes": BY_MPIRUN,
    "sagemaker_mpi_custom_mpi_options": frozenset({MPI}),
    "sagemaker_distributed_dataparallel_custom_mpi_options": BY_MPIRUN - {MPI},
}


def choose_launcher(job: Job, machine: Machine) -> tuple[str, list[str]]:
    """Returns the launcher, and notes: why it is chosen, and which hyperparameters have no effect.

    Args:
        job: The job, with the hyperparameters that select a launcher.
        machine: This host's machine: a bare `docker run` uses MPI if it has several GPUs.

    Raises:
        ContractError: If the job asks for a launcher that is not supported.
    """
    chosen, why = _find_launcher(job, machine)
    without_effect = [
        f"{key} has no effect: it is for {', '.join(sorted(launchers))}, and the launcher is {chosen}"
        for key, launchers in _TUNES.items()
        if job.framework.get(key) and chosen not in launchers
    ]
    return chosen, why + without_effect


def _find_launcher(job: Job, machine: Machine) -> tuple[str, list[str]]:
    """Returns the launcher, and why it is chosen: the first one that is asked for, otherwise a plain process.

    Without hyperparameters.json, one host with several GPUs gets MPI. Raises ContractError for an unsupported launcher.
    """
    for key, name in _UNSUPPORTED.items():
        if read_flag(job.framework, key):
            raise ContractError(
                f"hyperparameters.json: {key} asks for the launcher {name}, which is not supported. "
                f"Supported are {', '.join(LAUNCHER_OF)}."
            )
    asked = [key for key in LAUNCHER_OF if read_flag(job.framework, key)]
    if asked:
        why = [f"launcher {LAUNCHER_OF[asked[0]]}: {asked[0]} is true"]
        return LAUNCHER_OF[asked[0]], why + [f"{key} is true too, and is ignored" for key in asked[1:]]
    if not job.configured and machine.gpus > 1 and len(job.cluster.hosts) == 1:
        return MPI, [f"launcher mpi: no hyperparameters.json and {machine.gpus} GPUs: one process for each"]
    return PROCESS, ["launcher process: no distribution is configured"]


def select_hosts(cluster: Cluster, framework: Mapping[str, object]) -> tuple[str, ...]:
    """Returns the hosts of the distribution. The first one leads the job.

    If sagemaker_distribution_instance_groups names groups, these are their hosts. If no groups are configured or named,
    or the named ones have no hosts, these are all hosts.

    Args:
        cluster: The hosts and instance groups of the job.
        framework: The hyperparameters for the launcher.

    Returns:
        Host names, in the order of resourceconfig.json.

    Raises:
        ContractError: If it is not a list of groups in resourceconfig.json.
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
    selected = {host for name in named for host in groups[name]}
    return tuple(host for host in cluster.hosts if host in selected) or cluster.hosts


def count_ranks(job: Job, machine: Machine, launcher: str, hosts: tuple[str, ...]) -> dict[str, int]:
    """Returns the number of ranks on each host. Hosts are filled in order; a host without ranks is left out.

    If the launcher runs the script once on each host, each has one rank.

    Args:
        job: The job.
        machine: This host's machine. Its GPUs limit the ranks per host.
        launcher: The launcher of the job.
        hosts: The hosts of the distribution.

    Raises:
        ContractError: If the job asks for more ranks than there are GPUs or places.
    """
    if launcher not in SEVERAL_RANKS:
        return dict.fromkeys(hosts, 1)
    asked = read_count(job.framework, "sagemaker_mpi_num_of_processes_per_host")
    per_host = asked or machine.gpus or 1
    if machine.gpus and per_host > machine.gpus:
        raise ContractError(
            f"The number of node-local MPI processes {per_host} cannot be larger than the device count {machine.gpus}. "
            f"Set sagemaker_mpi_num_of_processes_per_host to at most {machine.gpus}."
        )
    most = per_host * len(hosts)
    total = most
    if launcher in BY_MPIRUN:
        total = read_count(job.framework, "sagemaker_mpi_num_processes") or most
    if total > most:
        raise ContractError(
            f"sagemaker_mpi_num_processes is {total}, and {len(hosts)} hosts of {per_host} processes hold "
            f"{most}. Raise sagemaker_mpi_num_of_processes_per_host."
        )
    counts = {host: max(0, min(per_host, total - index * per_host)) for index, host in enumerate(hosts)}
    return {host: count for host, count in counts.items() if count}
