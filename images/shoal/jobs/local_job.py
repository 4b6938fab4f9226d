"""Runs the same job without Docker: `train` of this Python environment, with PyPI's Open MPI, on this one machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from shoal.errors import DockerError
from shoal.jobs import distribution, gpus, job


def run(request: job.JobRequest, console: Console) -> job.Outcome:
    """Run `request` here. Its hosts become one with all their ranks, so the job has the same world size.

    `request` is checked by the caller. Raises `DockerError` where this environment has no `train`. An interrupt reaches
    `train`, which ends its ranks.
    """
    train = Path(sys.executable).with_name("train")
    if not train.exists():
        raise DockerError(f"no `train` beside {sys.executable}. Install the toolkit there: pip install ./toolkit")
    name = job.new_name(request)
    directory = job.make_directory(request, name)
    folded = fold(request, console)
    (host,) = folded.host_names
    tree = directory / host
    job.write_tree(tree, folded, name)
    (tree / job.RESOURCES).write_bytes(job.resources(folded, host))
    for channel, path in request.channels.items():
        (tree / "input" / "data" / channel).symlink_to(path.resolve(), target_is_directory=True)
    environment = {
        **os.environ,
        **_visible_gpus(request.gpus),
        **request.script_variables,
        **request.environment,
        "SAGEMAKER_BASE_DIR": str(tree),
        "SAGEMAKER_SUBMIT_DIRECTORY": str(tree / "code"),
        "TRAINING_JOB_NAME": name,
        "PATH": f"{train.parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
    }
    if job.SECRET_FILE not in environment and (secret := request.secret()):
        environment.setdefault(job.SECRET, secret)
    code = _train(str(train), environment, console)
    shutil.rmtree(tree / "code")
    return job.outcome(name, {host: 128 - code if code < 0 else code}, directory, {host: tree})


def fold(request: job.JobRequest, console: Console) -> job.JobRequest:
    """Return the request with all ranks on one host, and say so when that changes it."""
    if request.hosts == 1:
        return request
    given = distribution.with_processes_per_host(request.distribution, request.procs_per_host)
    asked = given.get("mpi", {}).get("processes_per_host", 1)
    ranks = request.hosts * asked
    console.print(
        f"without an engine: {request.hosts} hosts × {asked} ranks run as 1 host × {ranks} ranks on this machine",
        highlight=False,
    )
    mpi = {"enabled": True, **given.get("mpi", {}), "processes_per_host": ranks}
    return replace(request, hosts=1, procs_per_host=None, distribution={**given, "mpi": mpi})


def _visible_gpus(asked: str | None, devices: Path = Path("/dev")) -> dict[str, str]:
    """Return the variable that lets a process of this machine see the GPUs of `--gpus`. Raises `DockerError`."""
    if asked is None:
        return {}
    if asked != gpus.NONE and not list(devices.glob("nvidia[0-9]*")):
        raise DockerError(f"--gpus {asked}: this machine has no NVIDIA GPU. Fix: leave it out, or use --gpus none")
    return {} if asked == gpus.ALL else {"CUDA_VISIBLE_DEVICES": "" if asked == gpus.NONE else asked}


def _train(command: str, environment: dict[str, str], console: Console) -> int:
    process = subprocess.Popen([command], env=environment, stdout=console.file)
    try:
        return process.wait()
    except BaseException:  # interrupted: `train` ends its ranks and says so, then this ends
        process.terminate()
        process.wait()
        raise
