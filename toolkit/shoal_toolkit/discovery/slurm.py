"""Slurm: the nodes of a job step. `srun` starts one `train` on each node.

The variables are in Slurm's manual pages: srun and sbatch, "OUTPUT ENVIRONMENT VARIABLES". srun sets
SLURM_STEP_NODELIST, SLURM_STEP_NUM_NODES, SLURM_STEP_NUM_TASKS, SLURM_NODEID and SLURM_LOCALID for each task.
SLURMD_NODENAME is the name of its node. sbatch and salloc set SLURM_JOB_NODELIST and SLURM_JOB_NUM_NODES, and start
nothing on other nodes. With LaunchParameters=use_interactive_step (slurm.conf), salloc's shell is in a step of its own
on the first node. SLURM_STEP_ID of this step and of other special ones is at least 0xFFFFFFFA (slurm.h).
"""

from __future__ import annotations

from collections.abc import Mapping

from shoal_toolkit.discovery.host_list import HostList
from shoal_toolkit.discovery.sources import EXPLICIT, expand_hosts, read_number, require, shorten, show
from shoal_toolkit.errors import ContractError

_SECRET = (
    "On Slurm, let the batch script write a secret to a file of mode 600, and set SHOAL_JOB_SECRET_FILE to it before "
    "`srun`. All nodes must share its disk: examples/slurm/train.sbatch has this."
)
_OTHERS = ("SLURM_NODEID", "SLURM_JOB_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_ID", "SLURM_STEP_ID")
_FIRST_SPECIAL_STEP = 0xFFFFFFFA
_SRUN = "srun --ntasks-per-node=1 train"


def find_slurm(environ: Mapping[str, str], hostname: str, root: str) -> HostList | None:
    """Returns the nodes of this step; outside a step, of a job of one node.

    Raises:
        ContractError: If `train` does not run once on each of them, or the variables are incomplete.
    """
    if (read_number(environ, "SLURM_STEP_ID") or 0) >= _FIRST_SPECIAL_STEP:
        environ = {name: value for name, value in environ.items() if not name.startswith("SLURM_STEP_")}
    variable = next((name for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST") if environ.get(name)), "")
    if not variable:
        raise ContractError(
            f"Slurm: {show(environ, *_OTHERS)} is set, and no SLURM_STEP_NODELIST. "
            f"Fix: pass all SLURM_* variables into the container, or {EXPLICIT}."
        )
    if (read_number(environ, "SLURM_HET_SIZE") or 1) > 1:
        raise ContractError(f"Slurm: this job is heterogeneous, and each component lists only its nodes. {_fix()}")
    hosts = expand_hosts(environ[variable], variable)
    in_step = bool(environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_STEP_ID"))
    if len(hosts) > 1 and not in_step:
        raise ContractError(
            f"Slurm: this job has {len(hosts)} nodes ({environ[variable]}), and `train` was not started by srun: it "
            f"would run on one of them only. Fix: `{_SRUN}`. If srun did start it, pass all SLURM_* variables into "
            "the container."
        )
    _check_counts(environ, hosts, variable)
    rank = 0 if len(hosts) == 1 else require(environ, "SLURM_NODEID", "Slurm")
    _check_name(environ, hosts, rank)
    evidence = show(environ, variable, "SLURM_NODEID", "SLURM_JOB_ID")
    warnings = _warn_about_idle_nodes(environ, hosts, variable)
    warnings += () if in_step else _warn_about_login_node(environ, hosts, hostname)
    return HostList("Slurm", hosts, rank, evidence, _SECRET, warnings)


def _check_counts(environ: Mapping[str, str], hosts: tuple[str, ...], variable: str) -> None:
    count_name = "SLURM_STEP_NUM_NODES" if variable == "SLURM_STEP_NODELIST" else "SLURM_JOB_NUM_NODES"
    count = read_number(environ, count_name, 1)
    if count not in (None, len(hosts)):
        raise ContractError(f"Slurm: {show(environ, count_name, variable)}: these disagree. {_fix()}")
    tasks = read_number(environ, "SLURM_STEP_NUM_TASKS") or len(hosts)
    if tasks != len(hosts) or read_number(environ, "SLURM_LOCALID"):
        raise ContractError(
            f"Slurm: srun started {max(tasks, 2)} tasks on {len(hosts)} nodes. `train` runs once on each node, and "
            f"starts the ranks there itself. Fix: `{_SRUN}`; sagemaker_mpi_num_of_processes_per_host is the number of "
            "ranks, and --cpus-per-task or --exclusive gives them the node's cores."
        )


def _check_name(environ: Mapping[str, str], hosts: tuple[str, ...], rank: int) -> None:
    name = environ.get("SLURMD_NODENAME", "")
    if name in hosts and rank < len(hosts) and hosts[rank] != name:
        raise ContractError(
            f"Slurm: {show(environ, 'SLURM_NODEID', 'SLURMD_NODENAME')}, and the nodes are {', '.join(hosts)}: these "
            f"disagree. {_fix()}"
        )


def _warn_about_idle_nodes(environ: Mapping[str, str], hosts: tuple[str, ...], variable: str) -> tuple[str, ...]:
    count = read_number(environ, "SLURM_JOB_NUM_NODES", 1) or len(hosts)
    if count <= len(hosts):
        return ()
    return (
        f"this step of the Slurm job runs on {len(hosts)} of its {count} nodes, {environ[variable]}: the others take "
        "no part in this training.",
    )


def _warn_about_login_node(environ: Mapping[str, str], hosts: tuple[str, ...], hostname: str) -> tuple[str, ...]:
    """Another name is only a warning, because a container on the node can have a name of its own."""
    names = {shorten(name) for name in (environ.get("SLURMD_NODENAME", ""), hostname)}
    if names & {shorten(host) for host in hosts}:
        return ()
    return (
        f"Slurm gives this job the node {hosts[0]}, and this host is {hostname}: the training runs here, without srun. "
        f"Fix: `{_SRUN}`. In a container on {hosts[0]}, pass SLURMD_NODENAME into the container.",
    )


def _fix() -> str:
    return f"Fix: {EXPLICIT}."
