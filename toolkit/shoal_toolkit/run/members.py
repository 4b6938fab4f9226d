"""Gathers the hosts of a job on the first host: which are connected and ready, and the search for the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic

from shoal_toolkit.fast_typing import TYPE_CHECKING
from shoal_toolkit.log import write_log
from shoal_toolkit.run.host import HostTask
from shoal_toolkit.system.loop import Loop, Timer

if TYPE_CHECKING:  # imported when needed: sockets and hashes take too long for a job of one host
    from shoal_toolkit.hosts.connect import WorkerSearch
    from shoal_toolkit.hosts.wire import Channel

_PROGRESS_SECONDS = 15.0
_MIN_SEARCH_SECONDS = 1.0
_MAX_LISTED = 10


class Members:
    """The hosts of a job. An elastic job starts with some of them, at least `least`."""

    def __init__(self, hosts: Sequence[str], least: int) -> None:
        self.number = 0  # of the restart for which hosts get ready
        self.current: tuple[str, ...] = ()  # the hosts of the last start
        self._hosts = tuple(hosts)
        self._least = least
        self._present = {hosts[0]}
        self._ready: set[str] = set()
        self._expected = set(hosts)

    @property
    def are_elastic(self) -> bool:
        return self._least < len(self._hosts)

    @property
    def missing(self) -> list[str]:
        """The hosts without a connection."""
        return [host for host in self._hosts if host not in self._present]

    @property
    def waiting_for(self) -> list[str]:
        """The hosts with a connection for which the next start waits."""
        return sorted((self._expected & self._present) - self._ready)

    @property
    def are_short(self) -> bool:
        """Whether the next start needs a host without a connection."""
        return len(self._present) < self._least or not self._expected <= self._present

    @property
    def are_ready(self) -> bool:
        """Whether the job can start: all expected hosts are ready, and they are enough."""
        return self._expected <= self._ready and len(self._ready) >= self._least

    @property
    def newcomers(self) -> tuple[str, ...]:
        """The hosts that are ready, but not part of the last start."""
        return tuple(host for host in self._hosts if host in self._ready and host not in self.current)

    def needs(self, host: str) -> bool:
        """Whether the job can't go on without a host as if it had never come."""
        return host in self._expected or len(self._present - {host}) < self._least

    def add(self, host: str) -> None:
        """Notes a host that has connected."""
        self._present.add(host)

    def remove(self, host: str) -> None:
        """Notes that the connection to a host was lost."""
        self._present.discard(host)
        self._ready.discard(host)

    def note_ready(self, host: str) -> None:
        """Notes that a host can start. Raises ValueError if it was ready before."""
        if host in self._ready:
            raise ValueError("it is ready for the second time")
        self._ready.add(host)

    def expect_present(self) -> bool:
        """Makes the next start wait for no host without a connection. Does nothing and returns False without enough."""
        if not self.are_elastic or len(self._present) < self._least:
            return False
        self._expected &= self._present
        return True

    def begin(self, number: int) -> None:
        """Begins a restart: of an elastic job with the hosts left and the newcomers, otherwise with all hosts."""
        self.number = number
        if self.are_elastic:
            self._expected = (self._expected | self._ready) & self._present
        self._ready = set()

    def start(self) -> tuple[str, ...]:
        """Returns the hosts of the start, in the order of all hosts: those that are ready."""
        self.current = tuple(host for host in self._hosts if host in self._ready)
        self._expected = set(self.current)
        return self.current


class Gathering:
    """The search for the hosts of a job. Creating it starts nothing.

    Calls `on_found(host, channel)` for each worker that has proved the secret. Calls `on_limit(reason)` if hosts that
    the next start needs are missing at the time limit; the search then goes on.
    """

    def __init__(
        self, loop: Loop, task: HostTask, on_found: Callable[[str, Channel], None], on_limit: Callable[[str], None]
    ) -> None:
        self.members = Members(task.hosts, task.least_hosts)
        self._loop = loop
        self._task = task
        self._on_found = on_found
        self._on_limit = on_limit
        self._search: WorkerSearch | None = None
        self._began = monotonic()
        self._progress = Timer(0, lambda: None)

    @property
    def is_searching(self) -> bool:
        return self._search is not None and bool(self._search.missing)

    @property
    def is_past_limit(self) -> bool:
        """Whether it searches without a limit."""
        return self.is_searching and self._search is not None and not self._search.is_limited

    def search(self) -> None:
        """Starts to connect to the workers without a connection.

        There is a time limit if the next start needs one of them. One that runs already stays.
        """
        from shoal_toolkit.hosts.connect import WorkerSearch

        missing, settings = self.members.missing, self._task.settings
        if self._search is not None and self._search.missing:
            self._search.add(missing)
        elif missing:
            hosts = self._task.hosts
            args = (self._loop, hosts, settings.port, settings.secret, self._add, self._on_limit)
            self._search = WorkerSearch(*args, self._seconds, missing)
        if not self.members.are_short:
            self.remove_limit()
        elif self._search is not None and not self._search.is_limited:
            self._search.set_limit(self._seconds)
        self._progress.cancel()
        self._progress = self._loop.call_later(_PROGRESS_SECONDS, self._log_progress)

    @property
    def _seconds(self) -> float:
        """The time limit of a search that begins now. Before the first launch, all searches have one limit."""
        seconds = self._task.settings.hosts_timeout
        if self.members.current or self._search is None:
            return seconds
        return max(_MIN_SEARCH_SECONDS, self._began + seconds - monotonic())

    def _add(self, host: str, channel: Channel) -> None:
        """Notes a worker that was found, and passes it on. An elastic job with enough hosts needs no limit."""
        self.members.add(host)
        if self.members.are_elastic and not self.members.are_short:
            self.remove_limit()
        self._on_found(host, channel)

    def remove_limit(self) -> None:
        """Makes the search go on without a time limit."""
        if self._search is not None:
            self._search.set_limit(None)

    def announce_limit(self, seconds: float) -> None:
        """Shows a shorter limit in the log. It sets no timer: the caller ends the job then."""
        if self._search is not None:
            self._search.announce_limit(seconds)

    def _log_progress(self) -> None:
        waiting = [host for host in self.members.waiting_for if host != self._task.hosts[0]]
        if waiting:
            more = f" and {len(waiting) - _MAX_LISTED} more" if len(waiting) > _MAX_LISTED else ""
            limit = self._task.settings.setup_timeout
            shown = ", ".join(waiting[:_MAX_LISTED])
            write_log(f"{shown}{more} still set up, for at most {limit} s (SHOAL_SETUP_TIMEOUT)")
        if not self.members.are_ready:
            self._progress = self._loop.call_later(_PROGRESS_SECONDS, self._log_progress)

    def close(self) -> None:
        """Ends the search. Connections that were found stay open."""
        if self._search is not None:
            self._search.close()
