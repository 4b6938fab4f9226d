"""Shows a Slurm job on this machine: `make cluster-demo`.

Starts a cluster of two nodes, submits examples/slurm/train.sbatch from this checkout, shows the queue, the log and the
result, and ends the cluster. The job's directory stays in jobs/.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

from .slurm import ROOT, Cluster, Job, start_cluster


def main() -> int:
    """Runs the demonstration. Returns 0 if the job has trained."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the cluster is ended then, too
    prepare = [sys.executable, "examples/digits/prepare.py", ".cache/digits"]
    subprocess.run(prepare, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    (ROOT / "jobs").mkdir(exist_ok=True)
    print("starting slurmctld, munged and two slurmd ...", flush=True)
    with start_cluster() as cluster:
        show(cluster, "sinfo")
        command = ["sbatch", "--parsable", "--output=jobs/%x-%j.log", "examples/slurm/train.sbatch"]
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        number = int(show(cluster, *command, PATH=path))
        job = follow(cluster, number)
        show(cluster, "scontrol", "show", "job", number)
    print(f"{job.state}, exit code {job.exit_code}. The files of the nodes are in jobs/digits-{number}/")
    return 0 if job.state == "COMPLETED" else 1


def show(cluster: Cluster, *words: object, **variables: str) -> str:
    """Prints a command and its output, and returns the output."""
    print(f"\n$ {shlex.join(map(str, words))}", flush=True)
    done = cluster.run(*words, cwd=ROOT, variables=variables)
    print(done.stdout + done.stderr, end="", flush=True)
    return done.stdout


def follow(cluster: Cluster, number: int) -> Job:
    """Prints the queue once the job runs, and its log until it ends. Returns its end."""
    printed, shown = 0, False
    while True:
        job = cluster.read_job(number)
        if job.state == "RUNNING" and not shown:
            show(cluster, "squeue")
            print(f"\n$ tail -f jobs/digits-{number}.log", flush=True)
            shown = True
        print(job.log[printed:], end="", flush=True)
        printed = len(job.log)
        if job.ended:
            return job
        time.sleep(0.2)


if __name__ == "__main__":
    sys.exit(main())
