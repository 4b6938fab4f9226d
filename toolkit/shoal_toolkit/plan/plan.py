"""Decides what is launched: a pure function from a `Job` and a `Machine` to a `LaunchPlan`.

`train --explain` prints the plan, and tests check it, without starting a process.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from shoal_toolkit.discovery.host_list import HostList
from shoal_toolkit.errors import did_you_mean
from shoal_toolkit.fast_typing import TYPE_CHECKING, NamedTuple
from shoal_toolkit.job.contract import TOOLKIT_KEYS, Job, read_flag
from shoal_toolkit.job.launchers import BY_MPIRUN, LAUNCHER_KEYS, PROCESS, Launcher
from shoal_toolkit.job.machine import Machine
from shoal_toolkit.job.settings import SET_DEVICE, find_misspelt_variables, is_members_only
from shoal_toolkit.plan.arguments import (
    JSON_ARGUMENTS,
    STORE_TRUE,
    build_script_command,
    format_arguments,
    shorten_for_mpirun,
)
from shoal_toolkit.plan.environment import build_contract_variables, drop_oversized, separate_model_dir, sort_inherited
from shoal_toolkit.plan.fabric import choose_network_variables
from shoal_toolkit.plan.launcher import (
    DEFAULT_MASTER_PORT,
    Command,
    Start,
    can_fork,
    choose_launcher,
    count_ranks,
    select_hosts,
)

if TYPE_CHECKING:  # few jobs define metrics
    from shoal_toolkit.job.metrics import MetricPattern


class Sidecar(NamedTuple):
    """A process that runs next to the script on a host. If it ends before the job, the job fails.

    If it `drains`, it gets SIGTERM after the script has ended, and may finish its work.
    """

    name: str
    command: tuple[str, ...]
    env: Mapping[str, str]
    drains: bool


class LaunchPlan(NamedTuple):
    """The part of this host in a job."""

    launcher: Launcher
    hosts: tuple[str, ...]  # the one that leads the job first
    current_host: str
    ranks: Mapping[str, int]  # host → number of ranks, without hosts outside the distribution
    outside: tuple[str, ...]  # hosts outside the distribution: each runs the script once, as a job of its own
    setup: tuple[tuple[str, ...], ...]  # commands that every host runs before the launch
    setup_env: Mapping[str, str]  # variables for these commands only
    script: tuple[str, ...]
    can_fork: bool  # whether a process with imported frameworks can fork the script (sidecars/standby.py)
    command: tuple[str, ...]  # of this host; empty if the first host starts the ranks here
    daemon: Mapping[str, str]  # MCA parameter → value or mpi.ANY, which mpirun may pass to its daemon here
    sidecars: tuple[Sidecar, ...]
    cwd: str
    env: Mapping[str, str]  # variables to add to the environment
    removed: tuple[str, ...]  # variables of another launcher to remove from the environment, before that
    described: Mapping[str, str]  # variables of another launcher → the variable of each rank that has their value
    interface: str
    found: HostList  # where the hosts come from
    metrics: tuple[MetricPattern, ...]
    notes: tuple[str, ...]  # for the log
    reasons: tuple[str, ...]  # more notes, for `train --explain` only

    @property
    def is_first(self) -> bool:
        return self.current_host == self.hosts[0]

    @property
    def world_size(self) -> int:
        return sum(self.ranks.values())

    @property
    def by_mpirun(self) -> bool:
        """Whether mpirun on the first host starts all ranks; otherwise every host starts its own."""
        return self.launcher.ranks == BY_MPIRUN

    @property
    def has_ranks(self) -> bool:
        """Whether the ranks of this host, one or several, are child processes of a launcher."""
        return self.launcher.has_ranks and self.current_host not in self.outside

    @property
    def forks_ranks(self) -> bool:
        """Whether the ranks of this host are forked, also at the first start. One rank of mpirun gains nothing."""
        return self.has_ranks and self.can_fork and (not self.by_mpirun or self.ranks.get(self.current_host, 0) > 1)

    def runs_own_command(self, host: str) -> bool:
        """Whether a host starts a command of its own."""
        return not self.by_mpirun or host in self.outside

    def rank_of(self, host: str) -> int:
        """Returns the rank of the script on a host that runs it once. Hosts outside the distribution come last."""
        if host in self.outside:
            return self.world_size + self.outside.index(host)
        return list(self.ranks).index(host)


def make_plan(job: Job, machine: Machine, free_port: str = DEFAULT_MASTER_PORT) -> LaunchPlan:
    """Returns the plan of this host. Reads and changes nothing outside its arguments.

    Raises ContractError if the configuration can't be launched, and LaunchError if mpirun is needed and missing.

    Args:
        free_port: The rendezvous port for a job of one host.
    """
    machine, rehearsal, notes = _plan_rehearsal(job, machine)
    job = job._replace(hyperparameters=separate_model_dir(job, machine))
    launcher, launcher_notes = choose_launcher(job, machine)
    hosts = select_hosts(job.cluster, job.framework)
    outside = tuple(host for host in job.cluster.hosts if host not in hosts)
    here = PROCESS if job.cluster.current_host in outside else launcher
    start = Start(job, machine, here, hosts, count_ranks(job, machine, launcher, hosts))
    network = choose_network_variables(job, machine, here)
    more = {**network.variables, **(_allow_oversubscription(start) if rehearsal else {}), **rehearsal}
    start, script, removed, size_notes = _prepare_start(start, more, free_port)
    command = _build_command(start)
    notes += [*_job_notes(start), *launcher_notes, *_outside_notes(job, outside), *_pipe_notes(job, start.ranks)]
    notes += [*network.notes, *command.notes, *size_notes]
    return LaunchPlan(
        launcher=launcher,
        hosts=(*hosts, *outside),
        current_host=start.current_host,
        ranks=start.ranks,
        outside=outside,
        setup=tuple(_plan_setup(job, machine)),
        setup_env=_leave_out_code(job),
        script=script,
        can_fork=can_fork(start),
        command=command.words,
        daemon=command.daemon,
        sidecars=tuple(_plan_sidecars(start)),
        cwd=job.code_dir,
        env=start.env,
        removed=removed,
        described=start.described,
        interface=machine.interface,
        found=job.cluster.found,
        metrics=job.metrics,
        notes=tuple(notes),
        reasons=(*network.reasons, *_inherited_reasons(removed, start), *_device_reasons(start), *_fork_reasons(start)),
    )


def _prepare_start(
    start: Start, more: Mapping[str, str], free_port: str
) -> tuple[Start, tuple[str, ...], tuple[str, ...], list[str]]:
    """Returns the start with variables and a rank's command. Also the script, variables to remove, and notes."""
    job, machine, launcher = start.job, start.machine, start.launcher
    as_json = read_flag(job.toolkit, JSON_ARGUMENTS)
    arguments = [*format_arguments(job.hyperparameters, job.toolkit.get(STORE_TRUE), as_json), *job.extra_args]
    variables = _build_environment(start, arguments, free_port)
    variables.update(more)
    if is_members_only(job.environ):
        from shoal_toolkit.job.peer_filter import build_member_variables

        variables.update(build_member_variables(job, machine))
    by_mpirun = launcher.ranks == BY_MPIRUN
    env, size_notes = drop_oversized(variables, job.paths.config)
    script = build_script_command(job.script, machine.python, arguments, mpi4py=by_mpirun)
    rank_command, command_variables = shorten_for_mpirun(script) if by_mpirun else (script, {})
    env.update(command_variables)
    alone = not launcher.has_ranks and "RANK" not in variables
    removed, described = sort_inherited(job.environ, launcher.has_ranks, alone)
    if not launcher.has_ranks:
        env.update({name: variables[ours] for name, ours in described.items()})
    return start._replace(env=env, script=rank_command, described=described), tuple(script), removed, size_notes


def _build_command(start: Start) -> Command:
    if start.launcher.command == "script":
        return Command(tuple(start.script))
    from shoal_toolkit.plan.commands import build_command  # a plain process starts faster without

    return build_command(start)


def _plan_rehearsal(job: Job, machine: Machine) -> tuple[Machine, dict[str, str], list[str]]:
    """Returns the machine to plan for, and variables and notes of a rehearsal; nothing is added without one."""
    if not job.environ.get("SHOAL_REHEARSE"):
        return machine, {}, []
    from shoal_toolkit.plan import rehearsal

    if not rehearsal.is_rehearsal(job.environ):
        return machine, {}, []
    emulated, variables, note = rehearsal.emulate_gpus(job, machine)
    return emulated, variables, [note]


def _allow_oversubscription(start: Start) -> dict[str, str]:
    """Returns the variable with which a script's own mpirun can start a rank for each emulated GPU."""
    if start.launcher.ranks == BY_MPIRUN:
        return {}
    from shoal_toolkit.plan.rehearsal import allow_oversubscription

    variables = allow_oversubscription(start.machine.open_mpi)
    return {name: value for name, value in variables.items() if name not in start.job.environ}


def _plan_setup(job: Job, machine: Machine) -> list[tuple[str, ...]]:
    """Returns the commands before the launch: they install what the code needs, and make output/intermediate."""
    if not (job.code.requirements or job.code.lock or job.code.package or job.toolkit.get("sagemaker_s3_output")):
        return []
    from shoal_toolkit.plan import sidecars

    return [*sidecars.install_commands(job, machine), *sidecars.prepare_upload(job)]


def _plan_sidecars(start: Start) -> list[Sidecar]:
    job, machine, planned = start.job, start.machine, []
    if start.launcher.has_servers and len(start.hosts) > 1:
        from shoal_toolkit.plan import commands

        config = {"TF_CONFIG": commands.build_server_config(start.hosts, start.current_host)}
        server = (machine.python, "-c", commands.SERVER)
        planned.append(Sidecar("the parameter server", server, config, drains=False))
    if job.toolkit.get("sagemaker_s3_output"):
        from shoal_toolkit.plan import sidecars

        if command := sidecars.upload_command(job, machine):
            planned.append(Sidecar("the upload of output/intermediate", command, _leave_out_code(job), drains=True))
    return planned


def _leave_out_code(job: Job) -> dict[str, str]:
    """Returns variables for Python programs of the toolkit: the code directory may contain modules of any name."""
    return {"PYTHONPATH": job.environ.get("PYTHONPATH", ""), "PYTHONSAFEPATH": "1"}


def _build_environment(start: Start, arguments: list[str], free_port: str) -> dict[str, str]:
    """Returns the variables to add. Variables of the user for rendezvous, network and threads are kept."""
    job, machine, launcher, hosts, current_host = (
        start.job,
        start.machine,
        start.launcher,
        start.hosts,
        start.current_host,
    )
    alone = len(hosts) == 1
    variables = build_contract_variables(job, machine, arguments, hosts)
    variables["MASTER_ADDR"] = job.environ.get("MASTER_ADDR") or ("127.0.0.1" if alone else hosts[0])
    variables["MASTER_PORT"] = job.environ.get("MASTER_PORT") or (free_port if alone else DEFAULT_MASTER_PORT)
    variables["SM_MASTER_PORT"] = variables["MASTER_PORT"]
    if not launcher.has_ranks and not alone and current_host in hosts:
        # A script that is alone may start ranks itself. With a LOCAL_RANK, Lightning and transformers would take it for
        # a rank that another process has started.
        rank, size = str(hosts.index(current_host)), str(len(hosts))
        variables.update(RANK=rank, WORLD_SIZE=size, LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    # By default each rank would start a thread for every core that it sees, also beyond a quota. torchrun would set 1.
    if (launcher.has_ranks or machine.has_fewer_cpus) and "OMP_NUM_THREADS" not in job.environ:
        variables["OMP_NUM_THREADS"] = str(max(1, machine.cpus // start.ranks.get(current_host, 1)))
    directory = os.path.dirname(machine.python)
    if launcher.ranks != BY_MPIRUN and machine.open_mpi and os.path.dirname(machine.mpirun) == directory:
        # The files of Open MPI's wheel. Only its mpirun sets this variable, without which mpi4py aborts the script.
        variables["OPAL_PREFIX"] = job.environ.get("OPAL_PREFIX") or os.path.dirname(directory)
    if launcher.variables:
        from shoal_toolkit.plan.commands import build_launcher_variables

        variables.update(build_launcher_variables(start))
    return variables


def _address_notes(job: Job, hosts: Sequence[str]) -> list[str]:
    address, first = job.environ.get("MASTER_ADDR", ""), hosts[0]
    if not address:
        return []
    from shoal_toolkit.discovery.sources import is_local, shorten

    if is_local(address) or shorten(address) == shorten(first) or job.cluster.found.registration is not None:
        return []
    return [
        f"MASTER_ADDR={address} is set, and the first host is {first}: the ranks meet at {address}. Fix: unset "
        "MASTER_ADDR, unless it is another address of the first host."
    ]


def _port_notes(job: Job, machine: Machine, ranks: Mapping[str, int]) -> list[str]:
    if not is_members_only(job.environ) and len(job.cluster.hosts) == 1 and sum(ranks.values()) == 1:
        return []
    from shoal_toolkit.job.peer_filter import describe_open_ports

    return describe_open_ports(job, machine, ranks)


def _outside_notes(job: Job, outside: Sequence[str]) -> list[str]:
    if not outside:
        return []
    groups = job.framework.get("sagemaker_distribution_instance_groups")
    return [
        f"outside the distribution over the instance groups {groups}: {', '.join(outside)}. The script runs once on "
        "each of these hosts, on its own; SM_CURRENT_INSTANCE_GROUP is the group of its host."
    ]


def _pipe_notes(job: Job, ranks: Mapping[str, int]) -> list[str]:
    count = ranks.get(job.cluster.current_host, 1)
    shared = f". The {count} ranks of this host share each FIFO: let one of them read it" if count > 1 else ""
    return [
        f"the channel {name} is in Pipe mode: its data are in the FIFO {job.channels[name]}_0, in the next epoch in "
        f"{name}_1, and so on{shared}"
        for name in job.pipe_channels
    ]


def _inherited_reasons(removed: Sequence[str], start: Start) -> list[str]:
    texts = {"removed": removed, "set for each rank": start.described}
    return [f"variables of another launcher, {text}: {', '.join(names)}" for text, names in texts.items() if names]


def _device_reasons(start: Start) -> list[str]:
    """Returns the rule for the GPU of a rank, if this host has several ranks and GPUs (hooks/devices.py)."""
    if start.machine.gpus < 2 or start.ranks.get(start.current_host, 1) < 2:
        return []
    if start.job.environ.get(SET_DEVICE) == "0":
        return [f"GPUs: the script selects the GPU of each rank, because {SET_DEVICE}=0"]
    return [f"GPUs: each rank uses the GPU of its local rank, unless the script selects one ({SET_DEVICE}=0: off)"]


def _fork_reasons(start: Start) -> list[str]:
    """Returns how the ranks of a launcher that can fork them start."""
    if not start.launcher.has_ranks:
        return []
    if not start.launcher.can_fork:
        return [f"ranks: {start.launcher.name} starts them, and each imports the script's frameworks"]
    if can_fork(start) and start.launcher.ranks == BY_MPIRUN and start.ranks.get(start.current_host, 0) < 2:
        return ["ranks: mpirun starts the only rank of this host, which is not forked"]
    if can_fork(start):
        return ["ranks: one process imports the script's frameworks, and forks the ranks (SHOAL_STANDBY=0: off)"]
    why = "SHOAL_STANDBY=0, a rehearsal, a very long command, or a program that is not a .py file or module"
    return [f"ranks: each imports the script's frameworks, because of {why}"]


def _job_notes(start: Start) -> list[str]:
    job, machine = start.job, start.machine
    notes = list(job.cluster.found.warnings)
    if not job.configured:
        notes.append(f"no hyperparameters.json in {job.paths.config}: none are passed to the script")
    if machine.interface_replaced:
        notes.append(machine.interface_note)
    notes += job.entry_notes
    if job.toolkit.get("sagemaker_s3_output") and job.platform_syncs:
        notes.append(f"{job.paths.intermediate} existed before the job: its upload is left to the platform")
    known = TOOLKIT_KEYS | LAUNCHER_KEYS
    for key in sorted(set(job.framework) - known):
        if suggestion := did_you_mean(key, known):
            notes.append(f"the hyperparameter {key} is not known to this toolkit.{suggestion}")
    notes += find_misspelt_variables(job.environ)
    return [*notes, *_address_notes(job, start.hosts), *_port_notes(job, machine, start.ranks)]
