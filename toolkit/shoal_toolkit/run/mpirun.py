"""mpirun of one launch, on the first host: its log, and the end of it and of its daemons on the other hosts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from shoal_toolkit.fast_typing import TYPE_CHECKING
from shoal_toolkit.log import write_log
from shoal_toolkit.system.loop import Loop, Timer

if TYPE_CHECKING:  # imported for several hosts
    from shoal_toolkit.hosts.daemons import DaemonRequests, SendExitCode
    from shoal_toolkit.hosts.wire import Channel
    from shoal_toolkit.system.open_files import OpenFilesLimit

_OPEN_FILES, _OPEN_FILES_OF_HOST = 256, 4  # mpirun has about 40, and one for each host
FAREWELL_SECONDS = 5.0  # for the workers' last output after the end of mpirun


class Mpirun:
    """The end of mpirun and of its daemons. Creating it starts nothing.

    Calls `on_over()` when mpirun and all daemons have ended, so that their last output was read.
    """

    def __init__(self, loop: Loop, channels: Mapping[str, Channel], on_over: Callable[[], None]) -> None:
        self.code: int | None = None  # of mpirun, once it has ended
        self.failed_rank: int | None = None  # as the daemon of a worker logged
        self._loop = loop
        self._channels = channels
        self._on_over = on_over
        self._daemons: dict[str, SendExitCode] = {}  # hosts on which a daemon runs
        self._requests: DaemonRequests | None = None
        self._unrequested: set[str] = set()  # hosts for which mpirun has not requested a daemon
        self._limit: OpenFilesLimit | None = None  # of mpirun, until it has requested all daemons
        self._farewell = Timer(0, lambda: None)

    @property
    def is_over(self) -> bool:
        """Whether mpirun and all of its daemons have ended."""
        return self.code is not None and not self._daemons

    def listen(self, directory: str, hosts: Iterable[str]) -> None:
        """Listens for mpirun's requests to start daemons on these hosts, in the run directory, and passes them on."""
        from shoal_toolkit.hosts.daemons import DaemonRequests

        self._unrequested = set(hosts)
        self._requests = DaemonRequests(self._loop, directory, self._channels, self._on_request)

    def on_started(self, pid: int) -> None:
        """Lowers mpirun's limit of open files until it has requested all daemons. Its ranks start after that.

        For each host, Open MPI 4.1 starts a process that closes every number up to the limit: a million with some
        versions of Docker.
        """
        if self._unrequested:
            from shoal_toolkit.system.open_files import OpenFilesLimit

            self._limit = OpenFilesLimit(pid, _OPEN_FILES + _OPEN_FILES_OF_HOST * len(self._unrequested))

    def _on_request(self, host: str, command: str, send_exit_code: SendExitCode) -> None:
        """Passes mpirun's request on. It gets the daemon's exit code, or 0 when a rank runs there."""
        self._unrequested.discard(host)
        if self._limit is not None and not self._unrequested:  # before any rank can start
            self._limit.restore()
        channel = self._channels.get(host)
        if channel is None:
            write_log(f"mpirun requested a daemon on {host!r}, which is lost")
            send_exit_code(255)
            return
        from shoal_toolkit.hosts.messages import StartDaemon

        # Answered when a rank runs there: mpirun then has a connection to the daemon, and notices its end.
        self._daemons[host] = send_exit_code
        channel.send(StartDaemon(command))

    def note_start(self, host: str) -> None:
        """Answers mpirun's request for a daemon on a host where a rank has started."""
        if host in self._daemons:
            self._daemons[host](0)

    def end_daemon(self, host: str, code: int, failed_rank: int | None = None) -> bool:
        """Answers mpirun's request for a daemon that has ended; returns whether there was one."""
        send_exit_code = self._daemons.pop(host, None)
        if send_exit_code is None:
            return False
        if self.failed_rank is None:
            self.failed_rank = failed_rank
        send_exit_code(code)
        return True

    def end(self, code: int) -> None:
        """Notes the end of mpirun. The workers' daemons have 5 s to end."""
        self.code = code
        self._farewell = self._loop.call_later(FAREWELL_SECONDS, self._give_up)
        if self.is_over:
            self._on_over()

    def _give_up(self) -> None:
        for host in list(self._daemons):
            write_log(f"mpirun has ended, but its daemon on {host} has not within {FAREWELL_SECONDS:.0f} s")
            self.end_daemon(host, 255)
        self._on_over()

    def close(self) -> None:
        """Stops to listen and to wait. Daemons go on."""
        self._farewell.cancel()
        if self._requests is not None:
            self._requests.close()
