"""Keeps which hosts of a job are connected and ready, and which take part in the next start. For the first host."""

from __future__ import annotations

from collections.abc import Sequence


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
