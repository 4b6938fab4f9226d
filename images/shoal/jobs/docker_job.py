"""Runs a job in containers, one per host, and replaces lost hosts. All of it is removed when the job ends."""

from __future__ import annotations

import contextlib
import queue
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import docker
from rich.console import Console

from shoal import docker_client
from shoal.docker_client import containers
from shoal.errors import DockerError, UsageError
from shoal.jobs import docker_hosts, job, restarts
from shoal.jobs.docker_hosts import DockerHosts, HostExit
from shoal.jobs.record import OpenJob

STRAGGLER_SECONDS = 60
"""How long the other hosts may run after one has ended. All hosts of a job end with one result."""
FAREWELL_SECONDS = 10
"""How long the first host may run after another has ended with a result: `train` ends there within 5 s. If it runs on,
it waits for that host to come back."""


def run_job_in_docker(opened: OpenJob, console: Console) -> job.JobResult:
    """Run a job in containers to its end, and print the hosts' logs with the host's name before each line.

    The files of each host are copied to the job's directory, and its checkpoints to their own directory, also if the
    job fails. An interrupt stops the hosts, removes them, the network and the volume, and is raised again. A second
    interrupt does not wait for the script.

    Args:
        opened: The job, which the caller has checked.
        console: The console for logs and messages.

    Returns:
        The result. A job that failed raises nothing.

    Raises:
        DockerError: If Docker does not answer, refuses, or lacks the image.
        UsageError: If the source cannot be copied, there are fewer GPUs than hosts, or the job runs already.
    """
    client = docker_client.connect()
    is_filled = opened.resumed and _keep_volume(client, opened, console)
    with (
        _remove_all_at_end(client, opened, console),
        docker_hosts.create_hosts(client, opened.record.image, opened.record.request, opened.name, console) as hosts,
    ):
        if not is_filled:
            hosts.fill(opened.checkpoints)
        watch = _Watch(hosts)
        hosts.start(*hosts.by_name)
        opened.update(uncollected=True)
        try:
            exits = watch.wait()
        except BaseException:
            hosts.kill()  # those that a second interrupt did not wait for
            _collect(hosts, opened)  # the script may have saved files before it ended
            console.print(f"interrupted; files of the hosts are in {opened.directory}", soft_wrap=True, highlight=False)
            raise
        for reader in hosts.readers:
            reader.join()
        trees = _collect(hosts, opened)
    notes = {host: "killed by the out-of-memory killer" for host, end in exits.items() if end.out_of_memory}
    codes = {host: exits[host].exit_code for host in hosts.by_name}
    result = job.read_result(opened.name, codes, opened.directory, trees, notes)
    return replace(result, restarts=[*watch.restarts, *result.restarts])


def _keep_volume(client: docker.DockerClient, opened: OpenJob, console: Console) -> bool:
    """Remove the objects of an earlier command from Docker, and return whether its volume has the newest checkpoints.

    Prints a line if it should have them, but is gone. Raises `UsageError` if the job still runs, or then has none.
    """
    is_expected = opened.record.uncollected
    if docker_hosts.remove_earlier(client, opened.name, keep_volume=is_expected):
        return True
    if is_expected:
        opened.update(uncollected=False)
        lost = f"the Docker volume {docker_hosts.volume_name(opened.name)} with the newest checkpoints is gone"
        if not opened.checkpoints.has_files():
            raise UsageError(f"--resume {opened.name}: {lost}. Fix: start the job again without --resume")
        console.print(f"{lost}; continuing from {opened.checkpoints.path}", markup=False, soft_wrap=True)
    return False


@contextlib.contextmanager
def _remove_all_at_end(client: docker.DockerClient, opened: OpenJob, console: Console) -> Iterator[None]:
    """Remove all that the job has in Docker at the end. A volume with checkpoints that could not be collected stays."""
    try:
        yield
    finally:
        with containers.delay_interrupts():
            containers.remove_objects(client, opened.name, volumes=not opened.record.uncollected)
        if opened.record.uncollected:
            volume = docker_hosts.volume_name(opened.name)
            console.print(
                f"the newest checkpoints were not collected. They are in the Docker volume {volume}",
                soft_wrap=True,
                markup=False,
            )


def _collect(hosts: DockerHosts, opened: OpenJob) -> dict[str, Path]:
    """Copy checkpoints, models and output from the hosts, which have ended, and return the tree of each host."""
    try:
        hosts.collect(opened.checkpoints)
        opened.update(uncollected=False)
    finally:
        trees = {host: hosts.fetch_results(host, opened.directory / host) for host in hosts.by_name}
    return trees


@dataclass
class _Watch:
    """Waits for the hosts of a job, and replaces lost ones."""

    hosts: DockerHosts
    exits: dict[str, HostExit] = field(default_factory=dict)
    restarts: list[dict[str, Any]] = field(default_factory=list)
    """Restarts that the job.json of the last start does not list."""
    lost: int = 0
    """How many hosts were lost."""
    deadline: float | None = None
    """When to replace or stop hosts, because others have ended."""

    def wait(self) -> dict[str, HostExit]:
        """Wait until all hosts have ended, and return how.

        A lost host is replaced, `max_restarts` times; if the first host is lost, all are. `STRAGGLER_SECONDS` after the
        last one that ended, stop the others. An interrupt, or the loss of the connection to Docker, prints a message
        and stops all hosts. It is raised, the loss as `DockerError`.
        """
        try:
            while len(self.exits) < len(self.hosts.by_name):
                self._wait_for_one()
        except BaseException:
            seconds = docker_hosts.STOP_SECONDS
            print(
                f"shoal: stopping; the script has {seconds} s to end (interrupt again to stop at once)", file=sys.stderr
            )
            self.hosts.stop(self.hosts.by_name)
            raise
        return self.exits

    def _wait_for_one(self) -> None:
        """Wait until a host ends, and replace it if it was lost. At the deadline, replace or stop hosts."""
        timeout = None if self.deadline is None else max(0.0, self.deadline - time.monotonic())
        try:
            host, container_id, end = self.hosts.arrivals.get(timeout=timeout)
        except queue.Empty:
            self._end_wait()
            return
        if container_id != self.hosts.by_name[host].id:  # replaced meanwhile
            return
        if isinstance(end, Exception):
            raise DockerError(f"lost the connection to Docker while {host} ran: {end}") from end
        self.exits[host] = end
        self.deadline = time.monotonic() + STRAGGLER_SECONDS
        if host == self.hosts.first:
            self._on_first_ended(end)
        elif self._can_restart and self.hosts.first not in self.exits and not restarts.is_final(end.exit_code):
            if self.hosts.has_result(host):
                self.deadline = time.monotonic() + FAREWELL_SECONDS
            else:
                self._replace(host)

    def _on_first_ended(self, end: HostExit) -> None:
        """Start all hosts again if the first one was lost. Otherwise the others end soon."""
        if self._can_restart_all(end):
            self._restart_all(end)
        elif self.lost:  # a replacement that came too late would wait for it
            self.deadline = time.monotonic() + FAREWELL_SECONDS

    @property
    def _can_restart(self) -> bool:
        return self.lost < self.hosts.request.max_restarts

    def _can_restart_all(self, end: HostExit) -> bool:
        """Return whether all hosts start again after the end of the first one: it was lost, or gave up on another."""
        if not self._can_restart or restarts.is_final(end.exit_code):
            return False
        first = self.hosts.first
        if end.exit_code != restarts.RETRY_CODE and self.hosts.has_result(first):
            return False
        return len(self.restarts) + len(self.hosts.read_restarts(first)) < self.hosts.request.max_restarts

    def _end_wait(self) -> None:
        """Replace the hosts that have ended if the first one waits for them, otherwise stop the others."""
        self.deadline = None
        failed = [host for host, end in self.exits.items() if not restarts.is_final(end.exit_code)]
        if failed and self._can_restart and self.hosts.first not in self.exits:
            for host in failed:
                self._replace(host)
        else:
            self.hosts.stop(host for host in self.hosts.by_name if host not in self.exits)

    def _replace(self, host: str) -> None:
        """Start a new container for a lost host. The others keep theirs: `train` there waits for it."""
        end = self.exits.pop(host)
        self.lost += 1
        self._say(f"{host} was lost ({restarts.describe_exit(end.exit_code, end.out_of_memory)}): starting it again")
        self.hosts.create(host)
        self.hosts.start(host)
        self.deadline = None

    def _restart_all(self, end: HostExit) -> None:
        """Start new containers for all hosts, because the first one, which decides for all, was lost."""
        started = time.monotonic()
        first = self.hosts.first
        reason = f"The first host {first} was lost: {restarts.describe_exit(end.exit_code, end.out_of_memory)}"
        self._say(f"{reason}. Starting all hosts again")
        self.lost += 1
        self.restarts += self.hosts.read_restarts(first)
        self.hosts.stop(host for host in self.hosts.by_name if host not in self.exits)
        entry = restarts.describe_restart(len(self.restarts) + 1, reason, first)
        for host in self.hosts.by_name:
            self.hosts.create(host, restarts.restart_variables(entry))
        self.exits.clear()
        self.hosts.start(*self.hosts.by_name)
        self.restarts.append({**entry, "seconds": round(time.monotonic() - started, 1)})
        self.deadline = None

    def _say(self, text: str) -> None:
        self.hosts.console.print(f"shoal | {text}", markup=False, highlight=False, soft_wrap=True)
