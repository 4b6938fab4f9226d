"""Runs a job on this machine without Docker: `train` of this Python environment, with Open MPI from PyPI."""

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


def run_job_locally(request: job.JobRequest, console: Console) -> job.JobResult:
    """Run a job on this machine to its end. All ranks run on one host, so the world size is as requested.

    Its /opt/ml tree stays in the job's directory, without the copy of the code. An interrupt ends `train`, which ends
    its ranks.

    Args:
        request: The job, which the caller has checked.
        console: The console for the output of `train` and messages.

    Raises:
        DockerError: If this Python environment has no `train`, or the machine lacks the requested GPUs.
        UsageError: If the job's directory cannot be created, or the source cannot be copied.
    """
    train = Path(sys.executable).with_name("train")
    if not train.exists():
        raise DockerError(f"`train` is not installed next to {sys.executable}. Fix: pip install ./toolkit")
    name = job.make_job_name(request)
    directory = job.make_job_directory(request, name)
    merged = merge_hosts(request, console)
    (host,) = merged.host_names
    tree = directory / host
    job.write_tree(tree, merged, name)
    (tree / job.RESOURCE_CONFIG).write_bytes(job.encode_resource_config(merged, host))
    for channel, path in request.channels.items():
        (tree / "input" / "data" / channel).symlink_to(path.resolve(), target_is_directory=True)
    environment = {
        **os.environ,
        **_gpu_environment(request.gpus),
        **request.script_variables,
        **request.environment,
        "SAGEMAKER_BASE_DIR": str(tree),
        "SAGEMAKER_SUBMIT_DIRECTORY": str(tree / "code"),
        "TRAINING_JOB_NAME": name,
        "PATH": f"{train.parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
    }
    if job.SECRET_FILE not in environment and (secret := job.make_secret(request.environment)):
        environment.setdefault(job.SECRET, secret)
    code = _run_train(str(train), environment, console)
    shutil.rmtree(tree / "code")
    return job.read_result(name, {host: 128 - code if code < 0 else code}, directory, {host: tree})


def merge_hosts(request: job.JobRequest, console: Console) -> job.JobRequest:
    """Return the request with all ranks on one host, started by MPI; print a line then.

    A request for one host is returned as it is. Raises `UsageError` if there are several hosts, and `distribution`
    contradicts `procs_per_host`.
    """
    if request.hosts == 1:
        return request
    launch = distribution.set_processes_per_host(request.distribution, request.procs_per_host)
    per_host = launch.get("mpi", {}).get("processes_per_host", 1)
    ranks = request.hosts * per_host
    console.print(
        f"without Docker: {request.hosts} hosts × {per_host} ranks run as 1 host × {ranks} ranks on this machine",
        highlight=False,
    )
    mpi = {"enabled": True, **launch.get("mpi", {}), "processes_per_host": ranks}
    return replace(request, hosts=1, procs_per_host=None, distribution={**launch, "mpi": mpi})


def _gpu_environment(option: str | None, devices: Path = Path("/dev")) -> dict[str, str]:
    """Return the variable that limits the script to the GPUs of `--gpus`; no variable for `all` or None.

    Raises `DockerError` if GPUs are requested, and this machine has none. Their numbers are not checked.
    """
    if option is None:
        return {}
    if option != gpus.NONE and not list(devices.glob("nvidia[0-9]*")):
        raise DockerError(f"--gpus {option}: this machine has no NVIDIA GPU. Fix: leave out --gpus, or use --gpus none")
    return {} if option == gpus.ALL else {"CUDA_VISIBLE_DEVICES": "" if option == gpus.NONE else option}


def _run_train(command: str, environment: dict[str, str], console: Console) -> int:
    """Run `train` and return its exit code. An interrupt terminates it, waits for it and is raised again."""
    process = subprocess.Popen([command], env=environment, stdout=console.file)
    try:
        return process.wait()
    except BaseException:
        process.terminate()
        process.wait()
        raise
