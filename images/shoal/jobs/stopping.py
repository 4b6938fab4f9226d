"""Stops a job from another command: its own command stops the hosts, or if that was killed, this one does."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import docker
from docker.models.containers import Container
from rich.console import Console

from shoal import docker_client
from shoal.docker_client import containers
from shoal.errors import UsageError
from shoal.jobs import checkpoints, job, local_processes, results, running
from shoal.jobs.docker_hosts import DockerHosts, stop_containers
from shoal.jobs.docker_job import collect
from shoal.jobs.known_jobs import LOST, KnownJob, read_job
from shoal.jobs.live_view import PlainView
from shoal.jobs.record import LOCAL, STOPPED, OpenJob, collect_tree, find_trees, remove_checkpoints


def stop_job(found: KnownJob, console: Console) -> KnownJob:
    """Stop a job as an interrupt of its command does, wait for its end, and return it as it is then.

    The script gets SIGTERM and has 30 s to end. If this is called again meanwhile, the script is killed at once. If
    its command was killed, this one stops the hosts, collects files and checkpoints, and cleans up in Docker.

    A job that has ended stays as it is.

    Raises:
        UsageError: If the job's command is not visible here, or a lost job's checkpoints are used by another command.
        DockerError: If Docker does not answer.
    """
    if found.state == LOST:
        _stop_lost(found, console)
    elif found.is_running:
        try:
            os.kill(found.record.pid, signal.SIGTERM)
        except ProcessLookupError:  # it has just ended, or belongs to another container
            if running.is_running(found.directory):
                raise UsageError(
                    f"{found.name}: runs in a process that is not visible here ({found.record.pid}), such as one of"
                    " another container or machine. Fix: run this command there"
                ) from None
        running.wait_for_end(found.directory)
    try:
        return read_job(found.directory)
    except FileNotFoundError:  # of a new job, which ended before its hosts started
        code = 128 + signal.SIGTERM
        record = replace(found.record, state=STOPPED, exit_code=code, ended=time.time())
        return replace(found, state=STOPPED, record=record)


def _stop_lost(found: KnownJob, console: Console) -> None:
    """Stop the hosts of a lost job, collect their files, and remove its objects from Docker."""
    if found.record.engine == LOCAL:
        local_processes.stop_processes(_list_trees(found.directory))  # they hold the lock of the checkpoints
    place = found.record.request.checkpoints or found.directory / checkpoints.CONTENT
    with (
        checkpoints.open_directory(place, found.identity, found.name) as directory,
        running.mark_running(found.directory),
    ):
        opened = OpenJob(found.name, found.directory, found.record, directory, resumed=True)
        opened.update(pid=os.getpid())  # so that another `shoal stop` reaches this one
        if found.record.engine == LOCAL:
            _end_local_job(opened)
        else:
            _end_docker_job(opened, console)
        if opened.record.ended is None:
            opened.finish(128 + signal.SIGTERM, STOPPED)


def _end_docker_job(opened: OpenJob, console: Console) -> None:
    """Stop the containers of a job that still run, collect the files of all, and remove them with the network.

    A volume with checkpoints stays if there is no container to collect them from.
    """
    client = docker_client.connect()
    found = _find_containers(client, opened)
    still_running = [str(each.id) for each in found.values() if each.status == "running"]
    try:
        stop_containers(still_running)
    except (KeyboardInterrupt, SystemExit):  # again: at once
        for each in found.values():
            with contextlib.suppress(docker.errors.APIError):  # it has ended
                each.kill()
    if any(each.status != "created" for each in found.values()):  # otherwise the volume may be half filled
        hosts = DockerHosts(
            client=client,
            image=opened.record.image,
            request=opened.record.request,
            name=opened.name,
            identity=opened.identity,
            view=PlainView(console),
            tree=BytesIO(),
            secret=None,
            devices={},
            network="",
            log=opened.log,
            by_name=found,
        )
        for host in found:
            shutil.rmtree(opened.directory / host, ignore_errors=True)  # of a command that was killed while it copied
        trees = collect(hosts, opened)
        exit_codes = {host: _read_exit_code(each) for host, each in found.items()}
        result = results.read_result(opened.name, exit_codes, opened.directory, trees)
        if not still_running:
            opened.finish(result.exit_code)
    with containers.delay_interrupts():
        containers.remove_objects(client, opened.identity, volumes=not opened.record.uncollected)


def _find_containers(client: docker.DockerClient, opened: OpenJob) -> dict[str, Container]:
    """Return the containers of a job by host, the first host first."""
    found = client.containers.list(all=True, filters={"label": f"{containers.JOB_LABEL}={opened.identity}"})
    by_name = {str(each.name): each for each in found}
    names = {host: f"{opened.name}-{host}" for host in opened.record.request.host_names}
    return {host: by_name[name] for host, name in names.items() if name in by_name}


def _read_exit_code(container: Container) -> int:
    container.reload()
    return int(container.attrs["State"]["ExitCode"])


def _end_local_job(opened: OpenJob) -> None:
    """Collect the checkpoints of a job that has no process now, pack its results, and remove the copy of its code."""
    trees = {tree.name: tree for tree in _list_trees(opened.directory)}
    if opened.record.uncollected:  # otherwise no host has started, and its tree may be half filled
        for tree in find_trees(opened.directory):
            collect_tree(tree, opened.checkpoints)
    opened.update(uncollected=False)
    for tree in trees.values():
        remove_checkpoints(tree)
        shutil.rmtree(tree / "code", ignore_errors=True)
    if trees:
        results.read_result(opened.name, {}, opened.directory, trees)


def _list_trees(directory: Path) -> list[Path]:
    """Return the trees of the hosts of a job without Docker."""
    return [path.parents[2] for path in sorted(directory.glob(f"*/{job.RESOURCE_CONFIG}"))]
