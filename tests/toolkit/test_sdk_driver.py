"""In place of SDK 3's MPI driver, which imports paramiko."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from .conftest import Tree, clean_environment
from .test_plan import MACHINE, planned

CONFIG = {"process_count_per_node": 2, "mpi_additional_options": ["-x", "NCCL_DEBUG=INFO", "-x", "GREETING=a b"]}


def run_driver(tree: Tree, script: Path) -> subprocess.CompletedProcess[str]:
    script.parent.mkdir(parents=True, exist_ok=True)
    script.write_text("import paramiko\n")
    environment = clean_environment(
        SAGEMAKER_BASE_DIR=str(tree.base),
        SM_CURRENT_HOST="algo-1",
        SM_ENTRY_SCRIPT="train.py",
        SM_DISTRIBUTED_CONFIG=json.dumps(CONFIG),
    )
    command: list[str | Path] = [sys.executable, script]
    return subprocess.run(command, cwd=tree.code, env=environment, capture_output=True, text=True, check=False)


def test_the_driver_becomes_train(tree: Tree) -> None:
    tree.configure("hyperparameters", {"flag": "true", "x": "1", "name": "a b"})
    tree.script("import os, sys\nprint(os.environ['RANK'], os.environ['GREETING'], sys.argv[1:])\n")
    done = run_driver(tree, tree.base / "sm_drivers" / "distributed_drivers" / "mpi_driver.py")
    assert done.returncode == 0, done.stderr
    arguments = "['--flag', 'true', '--name', 'a b', '--x', '1']"
    assert sorted(line.partition("] ")[2] for line in done.stdout.splitlines()) == [
        f"{rank} a b {arguments}" for rank in range(2)
    ]
    assert "no paramiko and no sshd" in done.stderr
    assert tree.outcome() == {"success"}


def test_elsewhere_paramiko_is_missing(tree: Tree) -> None:
    done = run_driver(tree, tree.base / "mpi_driver.py")
    assert "ModuleNotFoundError: No module named 'paramiko'" in done.stderr


def test_without_a_number_there_is_a_rank_per_gpu(tree: Tree) -> None:
    from shoal_toolkit.hooks.sdk_driver import build_train_variables

    environ = {"SM_ENTRY_SCRIPT": "train.py", "SM_DISTRIBUTED_CONFIG": '{"process_count_per_node": null}'}
    plan = planned(tree, MACHINE._replace(gpus=4), **build_train_variables(environ, str(tree.code)))
    assert (plan.launcher.name, plan.world_size) == ("mpi", 4)
