"""Stops a job from another command: its own command stops the hosts, or if that was killed, this one does."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import replace
from io import BytesIO

import docker
from docker.models.containers import Container
from rich.console import Console

from shoal import docker_client
from shoal.docker_client import containers
from shoal.errors import UsageError
from shoal.jobs import checkpoints, processes, results, running
from shoal.jobs.hosts.docker import DockerHosts
from shoal.jobs.hosts.docker_objects import find_containers, stop_containers
from shoal.jobs.hosts.local import SECRETS
from shoal.jobs.job import LOCAL
from shoal.jobs.store import (
    LOST,
    STOPPED,
    KnownJob,
    OpenJob,
    find_checkpoints,
    find_trees,
    list_host_trees,
    read_job,
)
from shoal.jobs.view import PlainView


def stop_job(found: KnownJob, console: Console) -> KnownJob:
    """Stops a job as an interrupt of its command does, waits for its end, and returns it as it is then.

    The script gets SIGTERM and has 30 s to end. If this is called again meanwhile, the script is killed at once. If
    its command was killed, this one stops the hosts, collects files and checkpoints, and cleans up in Docker.

    A job that has ended stays as it is.

    Raises:
        UsageError: If the job is not this user's, or its command is not visible here. For a lost job, also if its
            checkpoints are used by another command or not marked as the job's.
        DockerError: If Docker does not answer.
    """
    running.check_own(found.directory, found.key, found.name)
    process = found.record.pid, found.record.process_start
    if found.state == LOST:
        _stop_lost(found, console)
    elif found.is_running:
        is_signalled = processes.send_signal(*process, signal.SIGTERM)
        if not is_signalled and running.is_running(found.directory):  # otherwise it has just ended
            raise UsageError(
                f"{found.name}: runs in a process that is not visible here ({found.record.pid}), such as one of"
                " another container or machine. Fix: run this command there"
            )
        running.wait_for_end(found.directory, lambda: processes.is_alive(*process))
    try:
        return read_job(found.directory)
    except FileNotFoundError:  # of a new job, which ended before its hosts started
        code = 128 + signal.SIGTERM
        record = replace(found.record, state=STOPPED, exit_code=code, ended=time.time())
        return replace(found, state=STOPPED, record=record)


def _stop_lost(found: KnownJob, console: Console) -> None:
    """Stops the hosts of a lost job, collects their files, and removes its objects from Docker."""
    if found.record.request.engine == LOCAL:
        processes.stop_processes(list_host_trees(found.directory))  # they hold the lock of the checkpoints
    place = find_checkpoints(found.record.request, found.directory)
    with (
        checkpoints.open_directory(place, found.identity, found.name, can_claim=False) as directory,
        running.mark_running(found.directory, found.key),
    ):
        opened = OpenJob(found.name, found.directory, found.record, directory, resumed=True)
        pid = os.getpid()  # so that another `shoal stop` reaches this one
        opened.update(pid=pid, process_start=processes.describe_start(pid))
        if found.record.request.engine == LOCAL:
            _end_local_job(opened)
        else:
            _end_docker_job(opened, console)
        if opened.record.ended is None:
            opened.finish(128 + signal.SIGTERM, STOPPED)


def _end_docker_job(opened: OpenJob, console: Console) -> None:
    """A volume with checkpoints stays if there is no container to collect them from."""
    client = docker_client.connect()
    found = find_containers(client, opened.identity, opened.record.request.host_names)
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
            results.remove_tree(opened.directory / host)  # of a command that was killed while it copied
        trees = hosts.collect(opened)
        exit_codes = {host: _read_exit_code(each) for host, each in found.items()}
        result = results.read_result(opened.name, exit_codes, opened.directory, trees)
        if not still_running:
            opened.finish(result.exit_code)
    with containers.delay_interrupts():
        containers.remove_objects(client, opened.identity, volumes=not opened.record.uncollected)


def _read_exit_code(container: Container) -> int:
    container.reload()
    return int(container.attrs["State"]["ExitCode"])


def _end_local_job(opened: OpenJob) -> None:
    """Collects the checkpoints of a job without a process, packs its results, and removes the copy of its code."""
    trees = {tree.name: tree for tree in list_host_trees(opened.directory)}
    if opened.record.uncollected:  # otherwise no host has started, and its tree may be half filled
        for tree in find_trees(opened.directory):
            checkpoints.collect_tree(tree, opened.checkpoints)
    opened.update(uncollected=False)
    for tree in trees.values():
        results.remove_tree(tree / checkpoints.CONTENT)
        results.remove_tree(tree / "code")
    results.remove_tree(opened.directory / SECRETS)
    if trees:
        results.read_result(opened.name, {}, opened.directory, trees)
