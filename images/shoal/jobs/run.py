"""Waits for the hosts of a job until all have ended, and replaces lost ones: containers, or local processes.

The contract of restarts with `train` is in docs/restarts.md: variables, exit codes and job.json.
"""

from __future__ import annotations

import contextlib
import json
import queue
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console

from shoal.clean_text import print_error
from shoal.console import print_line
from shoal.errors import DockerError
from shoal.jobs import job
from shoal.jobs.processes import STOP_SECONDS
from shoal.jobs.results import read_result
from shoal.jobs.store import OpenJob
from shoal.jobs.usage import Usage, sample_usage

RESTART, RESTART_REASON = "SHOAL_RESTART", "SHOAL_RESTART_REASON"
"""The number of restarts so far, and the reason of the last one in one line. `train` sets both for the script."""
MOST_RESTARTS = 10000
"""The largest limit that `train` takes."""
WRONG_CONFIGURATION, HOST_LOST, STOPPED = 2, 138, 143
"""Exit codes of `train`. docs/exit-codes.md lists them."""
_FINAL = (0, WRONG_CONFIGURATION, STOPPED)
"""Exit codes after which a new start is wrong."""


def is_final(exit_code: int) -> bool:
    """Returns whether a host that ended with this code is never started again, also without a result."""
    return exit_code in _FINAL


def describe_exit(exit_code: int, out_of_memory: bool = False) -> str:
    """Returns how a host that was lost has ended, in words."""
    if out_of_memory:
        return "killed by the out-of-memory killer"
    if exit_code == HOST_LOST:
        return "it has lost the other hosts"
    try:
        return f"killed by {signal.Signals(exit_code - 128).name}"
    except ValueError:
        return f"exit code {exit_code} without a result"


def describe_restart(number: int, reason: str, host: str) -> dict[str, Any]:
    """Returns an entry of `restarts` in job.json, as `train` writes it, but without its seconds."""
    return {"number": number, "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "reason": reason, "host": host}


def restart_variables(entry: Mapping[str, Any], most: int, before: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Returns the variables of hosts that are started again after a restart.

    `train` counts all restarts before it against its limit. So each one because a host came back raises the limit.

    Args:
        most: How often the job may restart.
        before: The earlier restarts.
    """
    variables = {RESTART: str(entry["number"]), RESTART_REASON: str(entry["reason"])}
    if growths := len(before) - count_failures(before):
        variables[job.MAX_RESTARTS] = str(min(most + growths, MOST_RESTARTS))
    return variables


def count_failures(listed: Sequence[Mapping[str, Any]]) -> int:
    """Returns how many restarts count against the limit: all but those because a host came back."""
    return sum(each.get("counted", True) is not False for each in listed)


def parse_restarts(report: bytes) -> list[dict[str, Any]]:
    """Returns the restarts that the job.json of a lost host lists; none if it cannot be read."""
    try:
        restarts = json.loads(report)["restarts"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return []
    return [each for each in restarts if isinstance(each, dict)] if isinstance(restarts, list) else []


STRAGGLER_SECONDS = 60
"""How long the other hosts may run after one has ended. All hosts of a job end with one result."""
FAREWELL_SECONDS = 10
"""How long the first host may run after another has ended with a result: `train` ends there within 5 s. If it runs on,
it waits for that host to come back."""


@dataclass(frozen=True)
class HostExit:
    """How a host ended."""

    exit_code: int
    out_of_memory: bool = False
    """Whether the kernel's out-of-memory killer ended its container."""


Arrival = tuple[str, str, HostExit | Exception]
"""A host, the ID of its start, and its exit or the error of Docker."""


class Hosts(Protocol):
    """The hosts of a job. Each can be started again under its name."""

    request: job.JobRequest
    arrivals: queue.SimpleQueue[Arrival]
    """Hosts that have ended."""

    @property
    def console(self) -> Console:
        """The console for messages."""

    @property
    def ids(self) -> Mapping[str, str]:
        """The ID of each host's last start."""

    @property
    def first(self) -> str:
        """The name of the host that decides for all."""

    def create(self, host: str, environment: Mapping[str, str] | None = None) -> None:
        """Prepares a host for a new start, with more variables than the job's own."""

    def start(self, *hosts: str) -> None:
        """Starts hosts. Their exits are put into `arrivals`."""

    def stop(self, hosts: Iterable[str]) -> None:
        """Stops hosts, all at the same time, and waits for them; an interrupt ends the wait."""

    def has_result(self, host: str) -> bool:
        """Returns whether `train` has written a result on a host."""

    def read_restarts(self, host: str) -> list[dict[str, Any]]:
        """Returns the restarts that `train` has listed in job.json on a host; none if it has not."""


class CollectedHosts(Hosts, Protocol):
    """Hosts with files that are collected when they have ended."""

    def join_readers(self) -> None:
        """Waits until the logs of hosts, which have ended, are shown and kept."""

    def read_usage(self) -> Mapping[str, Usage]:
        """Returns the use of CPU, memory and GPUs now. Only one thread may call this."""

    def end_interrupted(self, opened: OpenJob) -> None:
        """Kills the hosts that still run, and collects the files of their scripts."""

    def collect(self, opened: OpenJob) -> Mapping[str, Path]:
        """Collects checkpoints and files of the hosts, which have ended. Returns the tree of each host."""

    def begin_removal(self, opened: OpenJob, has_succeeded: bool) -> None:
        """Begins to remove hosts after `collect`. Meanwhile their results are read and packed."""


@dataclass
class Watch:
    """Waits for the hosts of a job, and replaces lost ones."""

    hosts: Hosts
    exits: dict[str, HostExit] = field(default_factory=dict)
    restarts: list[dict[str, Any]] = field(default_factory=list)
    """Restarts that the job.json of the last start does not list."""
    lost: int = 0
    """How many hosts were lost."""
    deadline: float | None = None
    """When to replace or stop hosts, because others have ended."""

    def wait(self) -> dict[str, HostExit]:
        """Waits until all hosts have ended, and returns how.

        A lost host is replaced, `max_restarts` times; if the first host is lost, all are. `STRAGGLER_SECONDS` after the
        last one that ended, stop the others. An interrupt, or the loss of the connection to Docker, prints a message
        and stops all hosts. It is raised, the loss as `DockerError`.
        """
        try:
            while len(self.exits) < len(self.hosts.ids):
                self._wait_for_one()
        except BaseException:
            with contextlib.suppress(OSError):  # the terminal is gone
                print_error(f"stopping; the script has {STOP_SECONDS} s to end (interrupt again to stop at once)")
            self.hosts.stop(self.hosts.ids)
            raise
        return self.exits

    def exit_codes(self) -> dict[str, int]:
        """Returns the exit code of each host. If an elastic job has succeeded, only the first host counts.

        The others may have been lost shortly before, or have come back too late.
        """
        first = self.hosts.first
        if self._is_elastic and self.exits[first].exit_code == 0:
            return {first: 0}
        return {host: self.exits[host].exit_code for host in self.hosts.ids}

    @property
    def _is_elastic(self) -> bool:
        return 0 < self.hosts.request.min_hosts < self.hosts.request.hosts

    def _wait_for_one(self) -> None:
        """Waits until a host ends, and replaces it if it was lost. At the deadline, replaces or stops hosts."""
        timeout = None if self.deadline is None else max(0.0, self.deadline - time.monotonic())
        try:
            host, container_id, end = self.hosts.arrivals.get(timeout=timeout)
        except queue.Empty:
            self._end_wait()
            return
        if container_id != self.hosts.ids[host]:  # replaced meanwhile
            return
        if isinstance(end, Exception):
            raise DockerError(
                f"The connection to Docker was lost while {host} ran: {end}. Fix: start Docker, and then shoal run"
                " --resume JOB"
            ) from end
        self.exits[host] = end
        self.deadline = time.monotonic() + STRAGGLER_SECONDS
        if host == self.hosts.first:
            self._on_first_ended(end)
        elif self._can_restart and self.hosts.first not in self.exits and not is_final(end.exit_code):
            if self.hosts.has_result(host):
                self.deadline = time.monotonic() + FAREWELL_SECONDS
            else:
                self._replace(host)

    def _on_first_ended(self, end: HostExit) -> None:
        if self._can_restart_all(end):
            self._restart_all(end)
        elif self.lost:  # a replacement that came too late would wait for it
            self.deadline = time.monotonic() + FAREWELL_SECONDS

    @property
    def _can_restart(self) -> bool:
        return self.lost < self.hosts.request.max_restarts

    def _can_restart_all(self, end: HostExit) -> bool:
        """Returns whether all hosts start again after the end of the first one: it was lost, or gave up on another."""
        if not self._can_restart or is_final(end.exit_code):
            return False
        first = self.hosts.first
        if end.exit_code != HOST_LOST and self.hosts.has_result(first):
            return False
        listed = [*self.restarts, *self.hosts.read_restarts(first)]
        return count_failures(listed) < self.hosts.request.max_restarts

    def _end_wait(self) -> None:
        """An elastic job goes on without hosts that cannot be replaced: `train` decides when there are too few."""
        self.deadline = None
        failed = [host for host, end in self.exits.items() if not is_final(end.exit_code)]
        if failed and self._can_restart and self.hosts.first not in self.exits:
            for host in failed:
                self._replace(host)
        elif not (self._is_elastic and self.hosts.first not in self.exits):
            self.hosts.stop(host for host in self.hosts.ids if host not in self.exits)

    def _replace(self, host: str) -> None:
        """Starts a new container for a lost host. The others keep theirs: `train` there waits for it."""
        end = self.exits.pop(host)
        self.lost += 1
        self._say(f"{host} was lost ({describe_exit(end.exit_code, end.out_of_memory)}): starting it again")
        self.hosts.create(host)
        self.hosts.start(host)
        self.deadline = None

    def _restart_all(self, end: HostExit) -> None:
        """Starts new containers for all hosts, because the first one, which decides for all, was lost."""
        started = time.monotonic()
        first = self.hosts.first
        reason = f"The first host {first} was lost: {describe_exit(end.exit_code, end.out_of_memory)}"
        self._say(f"{reason}. Starting all hosts again")
        self.lost += 1
        self.restarts += self.hosts.read_restarts(first)
        self.hosts.stop(host for host in self.hosts.ids if host not in self.exits)
        entry = describe_restart(len(self.restarts) + 1, reason, first)
        variables = restart_variables(entry, self.hosts.request.max_restarts, self.restarts)
        for host in self.hosts.ids:
            self.hosts.create(host, variables)
        self.exits.clear()
        self.hosts.start(*self.hosts.ids)
        self.restarts.append({**entry, "seconds": round(time.monotonic() - started, 1)})
        self.deadline = None

    def _say(self, text: str) -> None:
        print_line(f"shoal | {text}", self.hosts.console)


def run_job(opened: OpenJob, hosts: CollectedHosts, start: Callable[[], None] | None = None) -> job.FinishedJob:
    """Runs the hosts of a job, which are ready to start, to their end, and collects its files.

    Args:
        opened: The job. Its record says from the start on that the newest checkpoints are not collected.
        hosts: Its hosts.
        start: Starts them all; None: `hosts.start` does.

    Returns:
        The result. A job that failed raises nothing, and an interrupt is raised again after the files are collected.
    """
    watch = Watch(hosts)
    if start is None:
        hosts.start(*hosts.ids)
    else:
        start()
    opened.update(uncollected=True)
    opened.on_started()
    try:
        with sample_usage(opened.log.usage, opened.log.began, hosts.read_usage):
            exits = watch.wait()
    except BaseException:
        hosts.end_interrupted(opened)
        raise
    hosts.join_readers()
    trees = hosts.collect(opened)
    hosts.begin_removal(opened, not any(watch.exit_codes().values()))
    notes = {host: "killed by the out-of-memory killer" for host, end in exits.items() if end.out_of_memory}
    result = read_result(opened.name, watch.exit_codes(), opened.directory, trees, notes)
    return replace(result, restarts=[*watch.restarts, *result.restarts])
