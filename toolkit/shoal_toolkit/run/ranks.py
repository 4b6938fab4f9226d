"""Watches the ranks on this host (their start, output and end), and signals them. Makes and removes the run directory.

The run directory has a FIFO for each rank's stdout and stderr, and one on which ranks report their start and end. So
the output keeps its rank, bytes and order, and does not need the prefixes of mpirun or torchrun.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable

from shoal_toolkit.errors import LaunchError
from shoal_toolkit.fast_typing import Protocol
from shoal_toolkit.log import STDERR, STDOUT
from shoal_toolkit.output.pipes import FlowControl, Source
from shoal_toolkit.plan import rank_shell
from shoal_toolkit.run.script import ScriptEvents
from shoal_toolkit.system.loop import Loop
from shoal_toolkit.system.process import read_start_time, read_stat
from shoal_toolkit.system.process_tree import has_orphans, signal_handlers, signal_with_group

_MAX_PARENT_LENGTH = 60  # the path of a socket has at most 107 characters
_POLL_SECONDS = 0.1
_MAX_REPORT = 4096  # bytes of a line
# A rank, its local rank, its pid, and its process group if it leads none.
_START = re.compile(rf"{rank_shell.STARTED} (\d{{1,9}}) (\d{{1,9}}) (\d{{1,9}})(?: (\d{{1,9}}))?".encode())
_FORKED = re.compile(rf"{rank_shell.FORKED} (\d{{1,9}}) (\d{{1,9}}) (\d{{1,9}}) (\d{{1,9}})".encode())
_END = re.compile(rf"{rank_shell.ENDED} (\d{{1,9}}) (\d{{1,3}})".encode())


def make_run_directory() -> str:
    """Makes a directory with a short path that only this user can enter, and returns it.

    It is in TMPDIR if that is short enough and can be written, otherwise in /tmp, /dev/shm or /var/tmp.

    Raises:
        LaunchError: If there is no directory for temporary files.
    """
    candidates = [os.environ.get("TMPDIR", ""), "/tmp", "/dev/shm", "/var/tmp"]
    problem: OSError | None = None
    for parent in candidates:
        if not parent or len(parent) > _MAX_PARENT_LENGTH:
            continue
        path = os.path.join(parent, f"shoal-{os.urandom(8).hex()}")
        try:
            os.mkdir(path, 0o700)
            _make_memory_directory(path)
            return path
        except OSError as error:
            problem = error
    tried = ", ".join(filter(None, candidates))
    raise LaunchError(
        f"No directory for temporary files: tried {tried} ({problem}). "
        "Fix: set TMPDIR to a directory that this user can write, "
        f"with a path of at most {_MAX_PARENT_LENGTH} characters."
    )


def _make_memory_directory(path: str) -> None:
    """In /dev/shm itself, another user could make the files before the ranks do, and change their messages."""
    try:
        os.mkdir(_memory_of(path), 0o700)
        os.symlink(_memory_of(path), os.path.join(path, rank_shell.MEMORY))
    except OSError:
        os.mkdir(os.path.join(path, rank_shell.MEMORY), 0o700)


def _memory_of(path: str) -> str:
    return os.path.join("/dev/shm", f"{os.path.basename(path)}-mpi")


def remove_run_directory(path: str) -> None:
    """Removes a run directory with everything in it. A script that cleaned up /tmp may have removed it already."""
    for top in (path, _memory_of(path)):
        for directory, links, names in os.walk(top, topdown=False):
            for name in (*names, *links):
                _try_remove(os.unlink, os.path.join(directory, name))
            _try_remove(os.rmdir, directory)


def _try_remove(remove: Callable[[str], None], path: str) -> None:
    try:
        remove(path)
    except OSError:
        return  # it is gone, or a process still writes there


class RankEvents(ScriptEvents, Protocol):
    """Called for events of the ranks that a launcher starts on this host."""

    def on_rank_ended(self, rank: int, code: int) -> None:
        """A rank that a launcher started has ended with an exit code."""


class LocalRanks:
    """The ranks of this host, at most `count`. Creating it makes their FIFOs in `directory`, and reads them."""

    def __init__(self, loop: Loop, flow: FlowControl, directory: str, count: int, events: RankEvents) -> None:
        self._loop = loop
        self._flow = flow
        self._directory = directory
        self._on = events
        self._rank_of: dict[int, int] = {}  # by local rank
        self._start_times: dict[int, str] = {}  # by the pid of the rank's shell
        self._groups: dict[int, int] = {}  # of processes, by the same pid, if that does not lead it
        self._sessions: dict[int, str] = {}  # of these groups, by the same pid
        self._shell_of: dict[int, int] = {}  # rank → pid of its shell
        self._partial = b""  # an incomplete line of a report
        self._saving: dict[int, int] = {}  # rank that has ended → its exit code, while child processes of it run
        self._stopped_by = 0
        self._writers: list[int] = []
        self._reports = self._open_fifo(rank_shell.EVENTS, self._read_reports)
        self._outputs = [
            self._open_fifo(f"{name}.{local}", self._reader_of(local, stream))
            for local in range(count)
            for name, stream in (("out", STDOUT), ("err", STDERR))
        ]

    def signal(self, number: int) -> None:
        """Signals every running rank and the processes in its group. Without a group: those below its shell."""
        for pid, started in self._start_times.items():
            # mpirun makes each rank the leader of a group. torchrun does not: then the processes below the shell count.
            if started and read_start_time(pid) == started:
                signal_with_group(pid, self._group_of(pid), number)

    def _group_of(self, pid: int) -> int:
        return self._groups.get(pid, pid)

    def pass_on(self, number: int) -> int:
        """Signals the processes of each running rank that handle a signal; see signal_handlers."""
        running = [pid for pid, started in self._start_times.items() if started and read_start_time(pid) == started]
        return sum(signal_handlers(pid, number) for pid in running)

    def stop(self, number: int) -> None:
        """Signals every rank, also those that start later. From now on a rank that ends keeps its shell running.

        For that it makes the file STOPPING in the run directory, if that still exists. A shell that finds it does not
        start its script any more.
        """
        self._stopped_by = number
        path = os.path.join(self._directory, rank_shell.STOPPING)
        try:
            with open(f"{path}.part", "w", encoding="ascii") as file:
                file.write(f"{os.getpid()} {number}\n")
            os.replace(f"{path}.part", path)
        except OSError:  # a script that cleaned up /tmp removed the directory: signal the ranks anyway
            pass
        self.signal(number)

    def read_reports(self) -> None:
        """Reports the starts and ends of ranks that are waiting to be read."""
        self._reports.poll()

    def finish(self) -> None:
        """Reads the last output of the ranks, reports their end, and closes the FIFOs. Call it when all have ended."""
        for source in (self._reports, *self._outputs):
            source.finish()
        while self._saving:
            self._on.on_rank_ended(*self._saving.popitem())
        for writer in self._writers:
            os.close(writer)
        self._writers = []

    def _open_fifo(self, name: str, on_data: Callable[[bytes], None]) -> Source:
        """Makes a FIFO that only this user can open, keeps a writer open, and reads it to `on_data`."""
        path = os.path.join(self._directory, name)
        os.mkfifo(path, 0o600)
        reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        # A writer of our own: otherwise the FIFO would end before the first rank opens it, and between two ranks.
        self._writers.append(os.open(path, os.O_WRONLY))
        return Source(self._loop, self._flow, reader, on_data)

    def _reader_of(self, local: int, stream: int) -> Callable[[bytes], None]:
        def read(data: bytes) -> None:
            if local not in self._rank_of:
                self.read_reports()  # a rank reports its start before it writes
            self._on.on_rank_output(stream, self._rank_of.get(local, local), data)

        return read

    def _read_reports(self, data: bytes) -> None:
        """Handles the lines of the ranks' shells. One is shorter than PIPE_BUF, so that lines don't mix."""
        *lines, partial = (self._partial + data).split(b"\n")
        self._partial = partial[:_MAX_REPORT]
        for line in lines:
            if found := _START.fullmatch(line):
                self._on_started(*map(int, filter(None, found.groups())))
            elif found := _FORKED.fullmatch(line):
                self._on_forked(*map(int, found.groups()))
            elif found := _END.fullmatch(line):
                self._on_ended(*map(int, found.groups()))

    def _on_started(self, rank: int, local: int, pid: int, group: int = 0) -> None:
        self._rank_of[local] = rank
        self._start_times[pid] = read_start_time(pid)
        self._groups[pid] = group or pid
        self._sessions[pid] = "".join(read_stat(pid)[3:4])
        self._shell_of[rank] = pid
        self._on.on_rank_started(rank)
        if self._stopped_by:
            self.signal(self._stopped_by)

    def _on_forked(self, rank: int, _: int, pid: int, group: int) -> None:
        """Notes that a process of the standby is the rank. Its shell only waits for it."""
        self._start_times.pop(self._shell_of.get(rank, 0), None)
        self._start_times[pid] = read_start_time(pid)
        self._groups[pid] = group
        self._sessions[pid] = "".join(read_stat(pid)[3:4])
        self._shell_of[rank] = pid
        if self._stopped_by:
            self.signal(self._stopped_by)

    def _on_ended(self, rank: int, code: int) -> None:
        """Reads the last output of this host's ranks, and reports the end of one."""
        shell = self._shell_of.get(rank, 0)
        # A rank that is forked is gone, and its group stays while child processes run. A shell is there.
        same = read_start_time(shell) in ("", self._start_times.get(shell))
        session = self._sessions.get(shell, "")
        if self._stopped_by and same and has_orphans(self._group_of(shell), session):
            # A script that is a shell ends at once after a signal, but its child may save a checkpoint.
            self._saving[rank] = code
            self._loop.call_later(_POLL_SECONDS, lambda: self._check_saving(rank))
            return
        for output in self._outputs:
            output.poll()  # its last output came before the report
        self._on.on_rank_ended(rank, code)

    def _check_saving(self, rank: int) -> None:
        code = self._saving.pop(rank, None)
        if code is not None:
            self._on_ended(rank, code)
