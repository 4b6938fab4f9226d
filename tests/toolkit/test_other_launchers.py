"""Variables of another launcher, which has started `train`: they describe each rank, or are removed."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from shoal_toolkit.files import read_table
from shoal_toolkit.plan.rank_shell import wrap_for_torchrun
from shoal_toolkit.run.standby import list_rank_variables

from .conftest import TRAIN, Run, Tree, clean_environment
from .loopback import started, two_trees
from .test_plan import MACHINE, planned

PRINT = "import json, os; print(json.dumps(dict(os.environ)))"
OF_TORCH = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
# What srun sets for one task on one node, and Kubeflow for torchrun.
SLURM_TASK = dict.fromkeys(("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_ID"), "0")
SLURM_TASKS = dict.fromkeys(("SLURM_NTASKS", "SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE"), "1")
SLURM = {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "vm", "SLURMD_NODENAME": "vm", **SLURM_TASK, **SLURM_TASKS}
PET = {"PET_NNODES": "1", "PET_NODE_RANK": "0", "PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": "nowhere:1"}


def scripts(out: str) -> list[dict[str, str]]:
    """The environments that the ranks have printed, by rank."""
    found = [json.loads(line[line.index("{") :]) for line in out.splitlines() if "{" in line]
    return sorted(found, key=lambda environ: environ.get("RANK", ""))


@pytest.mark.parametrize("name", read_table("other_launchers")["rank"])
def test_a_variable_of_a_rank_is_described_by_a_launcher_and_removed_from_a_script_that_is_alone(
    tree: Tree, name: str
) -> None:
    """With the same result in torchrun's shell and in a process that a standby forks."""
    value = OF_TORCH[read_table("other_launchers")["rank"][name]]
    assert name in planned(tree, MACHINE, (), **{name: "7"}).removed
    tree.hyperparameters(sagemaker_torch_distributed_enabled=True, sagemaker_mpi_num_of_processes_per_host=2)
    made = planned(tree, MACHINE, (), **{name: "7"})
    assert name not in made.removed
    assert list_rank_variables(made)[1][name] == value
    shell = [word.replace("$$", "$") for word in wrap_for_torchrun(["env"], made.described)]
    environ = {**OF_TORCH, "SHOAL_RUN_DIR": str(tree.base), "SHOAL_CODE_DIR": "/", "PATH": "/usr/bin:/bin"}
    assert f"{name}={value}" in subprocess.run(shell, env=environ, capture_output=True, text=True).stdout.split("\n")


@pytest.mark.parametrize("launcher", ["sagemaker_torch_distributed_enabled", "sagemaker_mpi_enabled", "none"])
@pytest.mark.parametrize("name", ["PET_RDZV_BACKEND", "OMPI_MCA_orte_hnp_uri", "PMIX_SERVER_URI3", "HYDI_CONTROL_FD"])
def test_settings_of_another_launcher_are_removed_only_from_a_launcher(tree: Tree, launcher: str, name: str) -> None:
    """A script may start torchrun itself, which Kubeflow configures with PET_*."""
    tree.hyperparameters(**{launcher: True}, sagemaker_mpi_num_of_processes_per_host=2)
    assert (name in planned(tree, MACHINE, (), **{name: "x"}).removed) == (launcher != "none")


@pytest.mark.parametrize(
    "name", ["OMPI_MCA_btl", "PMIX_MCA_gds", "HYDRA_FULL_ERROR", "SLURM_JOB_ID", "SLURM_NODELIST", "SLURM_CPUS_ON_NODE"]
)
def test_settings_of_the_user_and_facts_about_the_job_stay(tree: Tree, name: str) -> None:
    assert planned(tree, MACHINE, (), **{name: "x"}).removed == ()
    tree.hyperparameters(sagemaker_torch_distributed_enabled=True, sagemaker_mpi_num_of_processes_per_host=2)
    assert planned(tree, MACHINE, (), **{name: "x"}).removed == ()


@pytest.mark.parametrize(
    ("inherited", "removed"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}, {"RANK", "WORLD_SIZE"}),
        ({"LOCAL_RANK": "1"}, {"LOCAL_RANK"}),
        ({"RANK": "0", "WORLD_SIZE": "1"}, set()),
    ],
)
def test_a_script_that_is_alone_is_no_rank_of_several(tree: Tree, inherited: dict[str, str], removed: set[str]) -> None:
    assert set(planned(tree, MACHINE, (), **inherited).removed) == removed


def test_a_script_that_is_alone_on_slurm_is_no_task(tree: Tree, run: Run) -> None:
    tree.script(PRINT)
    (environ,) = scripts(run(SAGEMAKER_PROGRAM="train.py", **SLURM, **PET).out)
    left = {name for name in environ if name.startswith(("SLURM", "PET_"))}
    assert left == {"SLURM_JOB_ID", "SLURM_NODEID", "SLURM_STEP_NODELIST", "SLURMD_NODENAME", *PET}


@pytest.mark.mpi
def test_a_job_by_mpirun_inside_srun_and_mpirun(tree: Tree) -> None:
    tree.script(f"from mpi4py import MPI; assert MPI.COMM_WORLD.size == 2\n{PRINT}")
    tree.hyperparameters(sagemaker_mpi_enabled=True, sagemaker_mpi_num_of_processes_per_host=2)
    environment = clean_environment(SAGEMAKER_BASE_DIR=str(tree.base), SAGEMAKER_PROGRAM="train.py", **SLURM)
    outer = [str(Path(TRAIN[0]).parent / "mpirun"), "--allow-run-as-root", "--mca", "plm", "rsh", "-n", "1"]
    outer += ["--mca", "ras", "^slurm"]
    done = subprocess.run([*outer, *TRAIN], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for rank, environ in enumerate(scripts(done.stdout)):
        for name in ("SLURM_PROCID", "SLURM_LOCALID", "OMPI_COMM_WORLD_RANK", "RANK"):
            assert environ[name] == str(rank), name
        assert environ["SLURM_NTASKS"] == environ["SLURM_NTASKS_PER_NODE"] == "2"
        assert "SLURM_TASKS_PER_NODE" not in environ


def test_scripts_on_two_hosts_get_their_ranks_in_the_variables_of_other_launchers(tmp_path: Path) -> None:
    trees = two_trees(tmp_path)
    for tree in trees:
        tree.script(PRINT)
    inherited = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "SLURM_GTIDS": "0", "PMI_SIZE": "9"}
    with started(trees, (":", ":"), **inherited) as trains:
        found = scripts("".join(train.communicate(timeout=60)[0] for train in trains))
    assert [environ["OMPI_COMM_WORLD_RANK"] for environ in found] == ["0", "1"]
    assert [environ["PMI_SIZE"] for environ in found] == ["2", "2"]
    assert all("SLURM_GTIDS" in environ for environ in found)
