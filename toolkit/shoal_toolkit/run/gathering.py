"""Gathers the hosts of a job on the first host: looks for those that are missing, with a time limit if needed."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING

from shoal_toolkit.log import write_log
from shoal_toolkit.run.host import HostTask
from shoal_toolkit.run.members import Members
from shoal_toolkit.system.loop import Loop, Timer

if TYPE_CHECKING:  # imported when needed: sockets and hashes take too long for a job of one host
    from shoal_toolkit.hosts.connect import WorkerSearch
    from shoal_toolkit.hosts.wire import Channel

_PROGRESS_SECONDS = 15.0
_MIN_SEARCH_SECONDS = 1.0
_MAX_LISTED = 10


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
