"""Runs a job on this machine without Docker: `train` of this Python environment, with Open MPI from PyPI."""

from __future__ import annotations

import functools
import os
import shutil
import socket
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

from shoal.console import print_line
from shoal.docker_client import containers
from shoal.errors import DiskError, DockerError, UsageError
from shoal.jobs import checkpoints, distribution, gpu_usage, gpus, job, restarts, results, usage, variables
from shoal.jobs.hosts.local import LocalHosts
from shoal.jobs.run import STOP_SECONDS, Watch
from shoal.jobs.store import OpenJob, collect_tree
from shoal.jobs.view import View
from shoal.matrix import project

_MOST_HOSTS = 254
SECRETS = ".secrets"
"""The directory with the user's secrets, while the job runs. A resumed job leaves names with a dot in their place."""


def run_job_locally(opened: OpenJob, view: View) -> job.JobResult:
    """Run a job on this machine to its end. All ranks run on one host, so the world size is as requested.

    With a range of hosts, each is a `train` of its own, on a loopback address and without GPUs.

    Each host's /opt/ml tree stays in the job's directory, without the copy of the code. Checkpoints move from it to
    their own directory, also if the job fails. An interrupt ends `train`, which ends its ranks, and is raised again. A
    second interrupt kills both.

    The job has a TMPDIR of its own. In /tmp, another user can make a directory before the job does. The cache of
    torch.compile has a known name there, and ranks load programs from it.

    Args:
        opened: The job, which the caller has checked.
        view: Shows the output of `train`, and has the console for messages.

    Raises:
        DockerError: If this Python environment has no `train`, or the machine lacks the requested GPUs.
        UsageError: If the source cannot be copied, or MPI would start ranks on several hosts of this machine.
    """
    try:
        with TemporaryDirectory(prefix="shoal-", ignore_cleanup_errors=True) as temporary:
            return _run_hosts(opened, view, temporary)
    finally:
        results.remove_tree(opened.directory / SECRETS)


def _run_hosts(opened: OpenJob, view: View, temporary: str) -> job.JobResult:
    """Run the hosts of a job to their end, and return its result."""
    hosts = _create_hosts(opened, view, temporary)
    watch = Watch(hosts)
    shared = hosts.trees[hosts.first]
    opened.update(uncollected=True)
    opened.on_started()
    try:
        hosts.start(*hosts.trees)
        with (
            gpu_usage.measure_machine(usage.MACHINE, opened.record.request.gpus) as meter,
            usage.sample_usage(opened.log.usage, opened.log.began, functools.partial(usage.read_machine, meter)),
        ):
            watch.wait()
    finally:
        with containers.delay_interrupts():
            hosts.kill()  # those that a second interrupt did not wait for
            try:
                collect_tree(shared, opened.checkpoints)
                opened.update(uncollected=False)  # before they are removed
            except (OSError, shutil.Error, RecursionError, DiskError) as error:  # the job has its result all the same
                place = shared / checkpoints.CONTENT
                print_line(f"the checkpoints were not collected: {error}. They are in {place}", view.console)
        for tree in hosts.trees.values():
            if not opened.record.uncollected:
                results.remove_tree(tree / checkpoints.CONTENT)
            results.remove_tree(tree / "code")
    result = results.read_result(opened.name, watch.exit_codes(), opened.directory, hosts.trees)
    return replace(result, restarts=[*watch.restarts, *result.restarts])


def _create_hosts(opened: OpenJob, view: View, temporary: str) -> LocalHosts:
    """Make the tree of each host, and return hosts that are ready to start. They share one directory of checkpoints."""
    train = Path(sys.executable).with_name("train")
    if not train.exists():
        toolkit = project.find_shipped().root / "toolkit"
        raise DockerError(
            f"`train` is not installed next to {sys.executable}. Fix: {sys.executable} -m pip install {toolkit}"
        )
    request = opened.record.request
    merged = request if request.min_hosts else merge_hosts(request, view.console)
    names = list_loopback_names(request) if request.min_hosts else merged.host_names
    trees = {name: opened.directory / name for name in names}
    shared = trees[names[0]] / checkpoints.CONTENT
    for name, tree in trees.items():
        job.write_tree(tree, merged, opened.name)
        config = job.encode_resource_config(names, name, "lo" if request.min_hosts else "eth0")
        job.write_private(tree / job.RESOURCE_CONFIG, config)
        for channel, path in request.channels.items():
            (tree / "input" / "data" / channel).symlink_to(path.resolve(), target_is_directory=True)
        if tree != trees[names[0]]:
            (tree / checkpoints.CONTENT).rmdir()
            (tree / checkpoints.CONTENT).symlink_to(shared, target_is_directory=True)
    opened.checkpoints.copy_to(shared)
    _write_secrets(request, opened.directory / SECRETS)
    environment = {**_make_environment(opened, temporary), "PATH": _extend_path(train.parent)}
    hosts = LocalHosts(request, view, train, environment, trees, opened.checkpoints.lock, opened.log)
    for name in names:
        hosts.create(name)
    return hosts


def _make_environment(opened: OpenJob, temporary: str) -> dict[str, str]:
    """Return the variables that all hosts share. Several hosts get free ports, so that jobs can run side by side."""
    request = opened.record.request
    environment = {
        "SHOAL_STOP_GRACE": str(STOP_SECONDS),
        **(job.share_cpus(request, len(os.sched_getaffinity(0))) if request.min_hosts else {}),
        **job.MEMBERS_ONLY,
        **os.environ,
        "TMPDIR": temporary,
        **_gpu_environment(request.gpus),
        **request.script_variables,
        **restarts.limit_variables(request.max_restarts, request.min_hosts),
        **variables.locate_secrets(request.secrets, str(opened.directory / SECRETS)),
        **request.environment,
        "TRAINING_JOB_NAME": opened.name,
    }
    if request.min_hosts:
        environment["CUDA_VISIBLE_DEVICES"] = ""
        with socket.create_server(("", 0)) as agent, socket.create_server(("", 0)) as master:
            environment.setdefault("SHOAL_AGENT_PORT", str(agent.getsockname()[1]))
            environment.setdefault("MASTER_PORT", str(master.getsockname()[1]))
    if job.SECRET_FILE not in environment and (secret := job.make_secret(request.environment)):
        environment.setdefault(job.SECRET, secret)
    return environment


def _write_secrets(request: job.JobRequest, directory: Path) -> None:
    """Write a file for each secret. The caller removes the directory."""
    results.remove_tree(directory)  # of a command that was killed; a job that was copied here may have a link
    directory.mkdir(mode=0o700)
    for name, content in variables.read_secrets(request.secrets).items():
        job.write_private(directory / name, content, 0o400)


def _extend_path(directory: Path) -> str:
    """Return PATH with a directory before the others."""
    return f"{directory}{os.pathsep}{os.environ.get('PATH', os.defpath)}"


def list_loopback_names(request: job.JobRequest) -> list[str]:
    """Return the addresses that are the names of several hosts on this machine.

    Raises `UsageError` if the job needs MPI or GPUs: mpirun takes these hosts for one, and they would share the GPUs.
    """
    launch = distribution.set_processes_per_host(request.distribution, request.procs_per_host)
    uses_mpi = distribution.uses_mpirun(launch)
    for option, problem in {
        f"{request.hosts} hosts": request.hosts > _MOST_HOSTS and f"at most {_MOST_HOSTS} hosts fit on one machine",
        "--procs-per-host or --distribution": uses_mpi and "MPI takes several hosts on one machine for one",
        f"--gpus {request.gpus}": request.gpus not in (None, gpus.NONE) and "the hosts would share the GPUs",
    }.items():
        if problem:
            raise UsageError(
                f"--hosts {request.min_hosts}:{request.hosts} --engine none: {problem}. Fix: leave out {option}, or"
                " --engine none"
            )
    return [f"127.0.0.{number}" for number in range(1, request.hosts + 1)]


def merge_hosts(request: job.JobRequest, console: Console) -> job.JobRequest:
    """Return the request with all ranks on one host, started by MPI, or torchrun if selected; print a line then.

    A request for one host is returned as it is. Raises `UsageError` if there are several hosts, and `distribution`
    contradicts `procs_per_host`.
    """
    if request.hosts == 1:
        return request
    launch = distribution.set_processes_per_host(request.distribution, request.procs_per_host)
    key = distribution.find_rank_launcher(launch)
    per_host = launch.get(key, {}).get("processes_per_host", 1)
    ranks = request.hosts * per_host
    print_line(
        f"without Docker: {request.hosts} hosts × {per_host} ranks run as 1 host × {ranks} ranks on this machine",
        console,
    )
    launcher = {"enabled": True, **launch.get(key, {}), "processes_per_host": ranks}
    return replace(request, hosts=1, procs_per_host=None, distribution={**launch, key: launcher})


def _gpu_environment(option: str | None, devices: Path = Path("/dev")) -> dict[str, str]:
    """Return the variable that limits the script to the GPUs of `--gpus`; no variable for `all` or None.

    Raises `DockerError` if GPUs are requested, and this machine has none. Their numbers are not checked.
    """
    if option is None:
        return {}
    if option != gpus.NONE and not list(devices.glob("nvidia[0-9]*")):
        raise DockerError(f"--gpus {option}: this machine has no NVIDIA GPU. Fix: leave out --gpus, or use --gpus none")
    return {} if option == gpus.ALL else {"CUDA_VISIBLE_DEVICES": "" if option == gpus.NONE else option}
