"""The ranks that run on this host under mpirun or its daemon: their start, their output, their end.

A private directory holds a FIFO for each rank's stdout and stderr and one on which ranks say that they start and end,
so that output keeps its rank, its bytes and its order without passing through mpirun's or torchrun's tags.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from shoal_toolkit.errors import LaunchError
from shoal_toolkit.output.streams import Flow, Source
from shoal_toolkit.plan import rank_shell
from shoal_toolkit.system.loop import Loop
from shoal_toolkit.system.process import descendants, orphans_run, signal_group, signal_process, start_time

STDOUT, STDERR = 1, 2
SOCKET = "rsh.sock"


def make_run_directory() -> str:
    """Make a directory that only this user can enter, with a short path (a socket's has 107 characters at most)."""
    candidates = [os.environ.get("TMPDIR", ""), "/tmp", "/dev/shm", "/var/tmp"]
    problem: OSError | None = None
    for parent in candidates:
        if not parent or len(parent) > 60:
            continue
        path = os.path.join(parent, f"shoal-{os.urandom(8).hex()}")
        try:
            os.mkdir(path, 0o700)
            return path
        except OSError as error:
            problem = error
    raise LaunchError(f"No directory for temporary files: tried {', '.join(filter(None, candidates))} ({problem}).")


def remove_run_directory(path: str) -> None:
    """Remove the directory: FIFOs, a socket, Open MPI's files. A script that cleaned up /tmp has done it already."""
    for directory, _, names in os.walk(path, topdown=False):
        for name in names:
            _remove(os.unlink, os.path.join(directory, name))
        _remove(os.rmdir, directory)


def _remove(remove: Callable[[str], None], path: str) -> None:
    try:
        remove(path)
    except OSError:
        return  # it is gone, or a process that was left behind still writes there


_LOOK_AGAIN_SECONDS = 0.1


class LocalRanks:
    """The ranks of this host, as many as `count`."""

    def __init__(
        self,
        loop: Loop,
        flow: Flow,
        directory: str,
        count: int,
        on_start: Callable[[int], None],
        on_end: Callable[[int, int], None],
        on_output: Callable[[int, int, bytes], None],
    ) -> None:
        self._loop = loop
        self._flow = flow
        self._directory = directory
        self._on_start = on_start
        self._on_end = on_end
        self._on_output = on_output
        self._rank_of: dict[int, int] = {}
        self._pids: dict[int, str] = {}  # pid → start time
        self._announced = b""
        self._stopped_by = 0
        self._shell_of: dict[int, int] = {}  # rank → pid of its shell
        self._holders: list[int] = []
        self._events = self._open(os.path.join(directory, rank_shell.EVENTS), self._announce)
        self._outputs = [
            self._open(os.path.join(directory, f"{name}.{local}"), self._reader(local, stream))
            for local in range(count)
            for name, stream in (("out", STDOUT), ("err", STDERR))
        ]

    def signal(self, number: int) -> None:
        """Signal every rank that still runs, with the processes in its group."""
        for pid, started in self._pids.items():
            # mpirun makes each rank the leader of a group, torchrun does not: then the rank is all below its shell.
            if started and start_time(pid) == started and not signal_group(pid, number):
                for process in (*descendants(pid), pid):
                    signal_process(process, number)

    def stop(self, number: int) -> None:
        """Signal every rank, those too that start only now, and let those that leave at once wait for the others."""
        self._stopped_by = number
        try:
            with open(os.path.join(self._directory, rank_shell.STOPPING), "w", encoding="ascii") as file:
                file.write(f"{os.getpid()}\n")
        except OSError:  # a script that cleaned up /tmp: its ranks are told all the same
            pass
        self.signal(number)

    def finish(self) -> None:
        """Read to the end what the ranks wrote: they have all ended."""
        for source in (self._events, *self._outputs):
            source.finish()
        for holder in self._holders:
            os.close(holder)
        self._holders = []

    def _open(self, path: str, on_data: Callable[[bytes], None]) -> Source:
        os.mkfifo(path, 0o600)
        reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        # A writer of our own, or the FIFO would be at its end before the first rank comes and between two of them.
        self._holders.append(os.open(path, os.O_WRONLY))
        return Source(self._loop, self._flow, reader, on_data)

    def _reader(self, local: int, stream: int) -> Callable[[bytes], None]:
        def read(data: bytes) -> None:
            if local not in self._rank_of:
                self._events.poll()  # a rank says that it starts before it writes
            self._on_output(stream, self._rank_of.get(local, local), data)

        return read

    def _announce(self, data: bytes) -> None:
        """Lines of the ranks' shells; each is shorter than PIPE_BUF, so that they never mix."""
        *lines, self._announced = (self._announced + data).split(b"\n")
        for line in lines:
            event, *words = line.decode().split()
            numbers = [int(word) for word in words]
            if event == rank_shell.STARTED:
                self._started(*numbers)
            else:
                self._ended(*numbers)

    def _started(self, rank: int, local: int, pid: int) -> None:
        self._rank_of[local] = rank
        self._pids[pid] = start_time(pid)
        self._shell_of[rank] = pid
        self._on_start(rank)
        if self._stopped_by:
            self.signal(self._stopped_by)

    def _ended(self, rank: int, code: int) -> None:
        shell = self._shell_of.get(rank, 0)
        if self._stopped_by and start_time(shell) == self._pids.get(shell) and orphans_run(shell):
            # A script that is itself a shell dies of the signal at once; what it has started may be saving.
            self._loop.call_later(_LOOK_AGAIN_SECONDS, lambda: self._ended(rank, code))
            return
        for output in self._outputs:
            output.poll()  # its last words came before
        self._on_end(rank, code)
