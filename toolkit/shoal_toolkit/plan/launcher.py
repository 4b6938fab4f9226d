"""Chooses the launcher, the hosts of the distribution, and the number of ranks on each."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from shoal_toolkit.errors import ContractError, did_you_mean
from shoal_toolkit.fast_typing import NamedTuple
from shoal_toolkit.job.contract import Cluster, Job, read_count, read_flag
from shoal_toolkit.job.launchers import BY_MPIRUN, LAUNCHERS, MPI, PROCESS, Launcher
from shoal_toolkit.job.machine import Machine

DEFAULT_MASTER_PORT = "7777"
_UNSUPPORTED = {"sagemaker_pytorch_xla_multi_worker_enabled": "pytorchxla (AWS Trainium)"}


class Start(NamedTuple):
    """A launch on this host, for the functions that build its command and variables."""

    job: Job
    machine: Machine
    launcher: Launcher  # of this host
    hosts: tuple[str, ...]  # of the distribution
    ranks: Mapping[str, int]
    env: Mapping[str, str] = {}  # the variables of the plan; empty while they are built
    script: Sequence[str] = ()  # the command of a rank, and of the script below
    described: Mapping[str, str] = {}  # variables of another launcher → the variable of each rank that has their value

    @property
    def current_host(self) -> str:
        return self.job.cluster.current_host


STANDBY = "shoal_toolkit.sidecars.standby"


def can_fork(start: Start) -> bool:
    """Whether a process that has imported the script's frameworks can fork it: a file or a module of Python.

    Not in a rehearsal: emulated GPUs are made when Python starts, for the rank of that time.
    """
    words, env = start.script, start.job.environ
    is_python = os.path.basename(words[0]).startswith("python") and len(words) > 1
    allowed = start.launcher.can_fork and env.get("SHOAL_STANDBY") != "0" and "SHOAL_REHEARSE" not in start.env
    return is_python and allowed and (words[1].endswith(".py") or words[1] == "-m")


class Command(NamedTuple):
    """The command of a launcher on one host."""

    words: tuple[str, ...]  # empty if mpirun on the first host starts the ranks here
    daemon: Mapping[str, str] = {}  # MCA parameter → value or mpi.ANY, which mpirun may pass to its daemon here
    notes: tuple[str, ...] = ()  # for the log


def choose_launcher(job: Job, machine: Machine) -> tuple[Launcher, list[str]]:
    """Returns the launcher, and notes: why it is chosen, and which hyperparameters have no effect.

    Args:
        job: The job, with the hyperparameters that select a launcher.
        machine: This host's machine: a bare `docker run` uses MPI if it has several GPUs.

    Raises:
        ContractError: If the job asks for a launcher that is not supported.
    """
    chosen, why = _find_launcher(job, machine)
    tunes: dict[str, list[str]] = {}
    for launcher in LAUNCHERS.values():
        for key in (*launcher.tuned_by, *filter(None, [launcher.mpi_options, launcher.launch_options])):
            tunes.setdefault(key, []).append(launcher.name)
    without_effect = [
        f"{key} has no effect: it is for {', '.join(sorted(names))}, and the launcher is {chosen.name}"
        for key, names in tunes.items()
        if job.framework.get(key) and chosen.name not in names
    ]
    return chosen, why + without_effect


def _find_launcher(job: Job, machine: Machine) -> tuple[Launcher, list[str]]:
    """Returns the launcher, and why it is chosen. Raises ContractError for an unsupported launcher."""
    for key, name in _UNSUPPORTED.items():
        if read_flag(job.framework, key):
            supported = ", ".join(launcher.key for launcher in LAUNCHERS.values() if launcher.key)
            raise ContractError(
                f"hyperparameters.json: {key} asks for the launcher {name}, which is not supported. "
                f"Fix: enable one of {supported}."
            )
    asked = list_selected(job.framework)
    if asked:
        chosen, *others = asked
        why = [f"launcher {chosen.name}: {chosen.key} is true"]
        return chosen, why + [f"{other.key} is true too, and is ignored" for other in others]
    if not job.configured and machine.gpus > 1 and len(job.cluster.hosts) == 1:
        return MPI, [f"launcher mpi: no hyperparameters.json and {machine.gpus} GPUs: one process for each"]
    return PROCESS, ["launcher process: no distribution is configured"]


def list_selected(framework: Mapping[str, object]) -> list[Launcher]:
    """Returns the launchers that hyperparameters select; the first counts. Raises ContractError for a wrong flag."""
    return [launcher for launcher in LAUNCHERS.values() if launcher.key and read_flag(framework, launcher.key)]


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
            f"hyperparameters.json: sagemaker_distribution_instance_groups is {named!r}; it must be a list of "
            f"instance groups. Fix: list some of {list(groups)}."
        )
    for name in named:
        if name not in groups:
            raise ContractError(
                f"hyperparameters.json: sagemaker_distribution_instance_groups names {name!r}, and "
                f"resourceconfig.json has the instance groups {list(groups)}.{did_you_mean(str(name), groups)} "
                "Fix: name one of them."
            )
    selected = {host for name in named for host in groups[name]}
    return tuple(host for host in cluster.hosts if host in selected) or cluster.hosts


def count_ranks(job: Job, machine: Machine, launcher: Launcher, hosts: tuple[str, ...]) -> dict[str, int]:
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
    if not launcher.has_ranks:
        return dict.fromkeys(hosts, 1)
    asked = read_count(job.framework, "sagemaker_mpi_num_of_processes_per_host")
    per_host = asked or machine.gpus or 1
    if machine.gpus and per_host > machine.gpus:
        raise ContractError(
            f"The number of node-local MPI processes {per_host} cannot be larger than the device count {machine.gpus}. "
            f"Fix: set sagemaker_mpi_num_of_processes_per_host to at most {machine.gpus}."
        )
    most = per_host * len(hosts)
    total = most
    if launcher.ranks == BY_MPIRUN:
        total = read_count(job.framework, "sagemaker_mpi_num_processes") or most
    if total > most:
        raise ContractError(
            f"sagemaker_mpi_num_processes is {total}, and {len(hosts)} hosts of {per_host} "
            f"processes hold {most}. Fix: raise sagemaker_mpi_num_of_processes_per_host."
        )
    counts = {host: max(0, min(per_host, total - index * per_host)) for index, host in enumerate(hosts)}
    return {host: count for host, count in counts.items() if count}
