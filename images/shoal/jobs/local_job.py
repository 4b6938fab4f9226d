"""Runs a job on this machine without Docker: `train` of this Python environment, with Open MPI from PyPI."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from shoal.docker_client import containers
from shoal.errors import DockerError
from shoal.jobs import checkpoints, distribution, gpus, job, restarts
from shoal.jobs.record import OpenJob, collect_tree
from shoal.matrix import project

_PR_SET_CHILD_SUBREAPER = 36  # of Linux


def run_job_locally(opened: OpenJob, console: Console) -> job.JobResult:
    """Run a job on this machine to its end. All ranks run on one host, so the world size is as requested.

    Its /opt/ml tree stays in the job's directory, without the copy of the code. Checkpoints move from it to their own
    directory, also if the job fails. An interrupt ends `train`, which ends its ranks.

    Args:
        opened: The job, which the caller has checked.
        console: The console for the output of `train` and messages.

    Raises:
        DockerError: If this Python environment has no `train`, or the machine lacks the requested GPUs.
        UsageError: If the source cannot be copied.
    """
    request = opened.record.request
    train = Path(sys.executable).with_name("train")
    if not train.exists():
        toolkit = project.find(Path.cwd()).part("toolkit")
        raise DockerError(
            f"`train` is not installed next to {sys.executable}. Fix: {sys.executable} -m pip install {toolkit}"
        )
    merged = merge_hosts(request, console)
    (host,) = merged.host_names
    tree = opened.directory / host
    job.write_tree(tree, merged, opened.name)
    opened.checkpoints.copy_to(tree / checkpoints.CONTENT)
    (tree / job.RESOURCE_CONFIG).write_bytes(job.encode_resource_config(merged, host))
    for channel, path in request.channels.items():
        (tree / "input" / "data" / channel).symlink_to(path.resolve(), target_is_directory=True)
    environment = {
        **os.environ,
        **_gpu_environment(request.gpus),
        **request.script_variables,
        **restarts.limit_variables(request.max_restarts),
        **request.environment,
        "SAGEMAKER_BASE_DIR": str(tree),
        "SAGEMAKER_SUBMIT_DIRECTORY": str(tree / "code"),
        "TRAINING_JOB_NAME": opened.name,
        "PATH": f"{train.parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
    }
    if job.SECRET_FILE not in environment and (secret := job.make_secret(request.environment)):
        environment.setdefault(job.SECRET, secret)
    opened.update(uncollected=True)
    try:
        code, restarted = _run_with_restarts(str(train), environment, request.max_restarts, opened, tree, console)
    finally:
        with containers.delay_interrupts():
            collect_tree(tree, opened.checkpoints)
            opened.update(uncollected=False)  # before they are removed
        for part in (checkpoints.CONTENT, "code"):
            shutil.rmtree(tree / part)
    result = job.read_result(opened.name, {host: code}, opened.directory, {host: tree})
    return replace(result, restarts=[*restarted, *result.restarts])


def _run_with_restarts(
    train: str, environment: dict[str, str], most: int, opened: OpenJob, tree: Path, console: Console
) -> tuple[int, list[dict[str, Any]]]:
    """Run `train`, again if it ended without a result. Return its exit code, and restarts that job.json does not list.

    `train` itself restarts lost ranks. An end without a result means that `train` was killed.
    """
    restarted: list[dict[str, Any]] = []
    while True:
        code = _run_train(train, environment, opened.checkpoints.lock, console)
        output = tree / "output"
        if restarts.is_final(code) or any((output / name).exists() for name in ("success", "failure")):
            return code, restarted
        report = output / "job.json"
        listed = restarts.parse_restarts(report.read_bytes() if report.is_file() else b"")
        if len(restarted) + len(listed) >= most:
            return code, restarted
        reason = f"train was lost: {restarts.describe_exit(code)}"
        console.print(f"shoal | {reason}. Starting it again", markup=False, highlight=False, soft_wrap=True)
        entry = restarts.describe_restart(len(restarted) + len(listed) + 1, reason, tree.name)
        restarted += [*listed, {**entry, "seconds": None}]
        environment |= restarts.restart_variables(entry)
        for part in ("model", "output/data"):
            shutil.rmtree(tree / part, ignore_errors=True)
            (tree / part).mkdir(parents=True)
        report.unlink(missing_ok=True)


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


def _run_train(command: str, environment: dict[str, str], lock: int, console: Console) -> int:
    """Run `train` and return its exit code. An interrupt terminates it, waits for it and is raised again.

    A second interrupt kills it. If it is killed, its ranks are killed too: they would still write checkpoints. It
    inherits the lock of the checkpoints, so that they stay locked while it runs, also if this process is killed.
    """
    adopt_orphans = getattr(ctypes.CDLL(None), "prctl", lambda *_: None)
    adopt_orphans(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    process = subprocess.Popen([command], env=environment, stdout=console.file, pass_fds=[lock])
    try:
        code = process.wait()
    except BaseException:
        process.terminate()
        try:
            process.wait()
        finally:
            process.kill()
            process.wait()
            _kill_orphans()
        raise
    if code < 0:
        _kill_orphans()
        return 128 - code
    return code


def _kill_orphans() -> None:
    """Kill the processes that `train` has left, which have become children of this one, and wait for them."""
    while pids := [pid for file in Path("/proc/self/task").glob("*/children") for pid in file.read_text().split()]:
        for pid in map(int, pids):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
