"""A Slurm job of 2 nodes × 2 ranks, from the start of `srun` until the first rank runs, with and without `train`.

The rival is `srun` with a task for each rank, which starts the same script without us. Ours is one `train` for each
node, which starts the ranks with mpirun. The script notes the time, and ends. The cluster is Debian's Slurm on this
machine (tests/cluster/slurm.py). Both take turns, and the figures are medians.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import time
from pathlib import Path

from report import Figure

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))

from tests.cluster.slurm import NODES, Cluster, start_cluster  # noqa: E402

RANKS = 4
GOAL_SECONDS = 1.0  # more than the rival
HYPERPARAMETERS = '{"sagemaker_mpi_enabled": "true", "sagemaker_mpi_num_of_processes_per_host": "2"}'
SCRIPT = """import os, time
open(f"{os.environ['STARTED']}/{time.time()}-{os.environ['SLURMD_NODENAME']}-{os.getpid()}", "w")
"""
START = 'SAGEMAKER_BASE_DIR="$PWD/$SLURMD_NODENAME" exec "$0"'


def measure(rounds: int) -> list[Figure]:
    """Return the figures of a cluster that is started for them."""
    with start_cluster() as cluster:
        work = write_trees(cluster.directory)
        python = [sys.executable, work / "code" / "train.py"]
        rival = ["srun", "--nodes=2", "--ntasks-per-node=2", "--overcommit", *python]
        train = Path(sys.executable).with_name("train")
        ours = ["srun", "--nodes=2", "--ntasks-per-node=1", "sh", "-c", START, train]
        seconds: list[tuple[float, float]] = []
        for _ in range(rounds):
            seconds.append((start_job(cluster, work, rival), start_job(cluster, work, ours)))
    without, with_us = (statistics.median(column) for column in zip(*seconds))
    more = statistics.median(ours - rival for rival, ours in seconds)
    return [
        Figure("slurm-2x2-until-first-rank", with_us, "s", rival=without, rival_name="srun"),
        Figure("slurm-2x2-more-than-srun", more, "s", goal=GOAL_SECONDS),
    ]


def write_trees(directory: Path) -> Path:
    """Write the script, and the base directory of each node. Returns the directory in which jobs start."""
    work = directory / "work"
    (work / "code").mkdir(parents=True)
    (work / "code" / "train.py").write_text(SCRIPT)
    for node in NODES:
        config = work / node / "input" / "config"
        config.mkdir(parents=True)
        (config / "hyperparameters.json").write_text(HYPERPARAMETERS)
    return work


def start_job(cluster: Cluster, work: Path, command: list[object]) -> float:
    """Run a job. Returns the seconds until its first rank has started."""
    started = work / "started"
    shutil.rmtree(started, ignore_errors=True)
    started.mkdir()
    code = {"SAGEMAKER_SUBMIT_DIRECTORY": str(work / "code"), "SAGEMAKER_PROGRAM": "train.py"}
    variables = {**code, "STARTED": str(started), "SHOAL_JOB_SECRET": os.urandom(16).hex()}
    began = time.time()
    done = cluster.run(*command, cwd=work, variables=variables)
    times = [float(path.name.partition("-")[0]) for path in started.iterdir()]
    if done.returncode or len(times) != RANKS:
        sys.exit(f"{len(times)} of {RANKS} ranks have started: {done.stdout}{done.stderr}")
    return min(times) - began
