"""The hosts of a job without Docker: one `train` for each, on this machine. Names of several are loopback addresses."""

from __future__ import annotations

import ctypes
import itertools
import os
import queue
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from rich.console import Console

from shoal.docker_client import containers
from shoal.jobs import job, restarts
from shoal.jobs.job_log import JobLog
from shoal.jobs.processes import BASE, read_environment
from shoal.jobs.run import Arrival, HostExit
from shoal.jobs.view import View
from shoal.limits import MOST_REPORT, read_file

_PR_SET_CHILD_SUBREAPER = 36  # of Linux
_STDERR = 2


@dataclass
class LocalHosts:
    """The processes of a job's hosts. Each can be started again in its tree, which then has new output directories.

    All inherit the lock of the checkpoints, so that they stay locked while a host runs, also if this process is killed.
    """

    request: job.JobRequest
    view: View
    """Shows the output of the hosts."""
    train: Path
    environment: Mapping[str, str]
    """The variables that all hosts share."""
    trees: Mapping[str, Path]
    """The directory of each host that stands for its /opt/ml."""
    lock: int
    """A file descriptor."""
    log: JobLog = field(default_factory=JobLog)
    """Keeps the lines of all hosts."""
    arrivals: queue.SimpleQueue[Arrival] = field(default_factory=queue.SimpleQueue)
    """Hosts that have ended."""
    ids: dict[str, str] = field(default_factory=dict)
    """The number of each host's last start."""
    _variables: dict[str, Mapping[str, str]] = field(default_factory=dict)
    _running: dict[str, tuple[subprocess.Popen[bytes], threading.Thread]] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    @property
    def console(self) -> Console:
        """The console for messages."""
        return self.view.console

    @property
    def first(self) -> str:
        """The name of the host that decides for all."""
        return next(iter(self.trees))

    def create(self, host: str, environment: Mapping[str, str] | None = None) -> None:
        """Prepare a host for a start, with more variables than the job's own. Files of an earlier start are removed."""
        tree = self.trees[host]
        if host in self.ids:
            for part in ("model", "output"):
                shutil.rmtree(tree / part, ignore_errors=True)
            for part in ("model", "output/data"):
                (tree / part).mkdir(parents=True)
        self._variables[host] = environment or {}
        self.ids[host] = str(next(self._numbers))

    def start(self, *hosts: str) -> None:
        """Start `train` of hosts, and threads that put their exits into `arrivals`. Several hosts' output has names.

        Processes that a killed `train` leaves become children of this one from now on.
        """
        adopt_orphans = getattr(ctypes.CDLL(None), "prctl", lambda *_: None)
        adopt_orphans(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        several = len(self.trees) > 1
        streams: dict[str, Any] = {
            "stdout": subprocess.PIPE,
            "stderr": subprocess.STDOUT if several else subprocess.PIPE,
        }
        for host in hosts:
            environment = {**self.environment, BASE: str(self.trees[host]), **self._variables[host]}
            environment["SAGEMAKER_SUBMIT_DIRECTORY"] = str(self.trees[host] / "code")
            command = [str(self.train), *self.request.train_command[1:]]
            process = subprocess.Popen(command, env=environment, pass_fds=[self.lock], **streams)
            thread = threading.Thread(target=self._await_end, args=(host, self.ids[host], process), daemon=True)
            self._running[host] = process, thread
            thread.start()

    def _await_end(self, host: str, number: str, process: subprocess.Popen[bytes]) -> None:
        """Body of a thread: print the output of a host, and put its exit into `arrivals`.

        The processes that a killed `train` has left are killed before: they would still write checkpoints.
        """
        readers = self._start_readers(host, process)
        code = process.wait()
        if code < 0:
            kill_orphans(self.trees[host])
        for reader in readers:
            reader.join(timeout=10)  # a process of the script may live on, with this stream
        self.arrivals.put((host, number, HostExit(128 - code if code < 0 else code)))

    def _start_readers(self, host: str, process: subprocess.Popen[bytes]) -> list[threading.Thread]:
        """Start threads that show and keep the output of a host.

        One host's bytes are not changed, unless they go to the terminal of a live view.
        """
        assert process.stdout is not None
        if process.stderr is None:
            readers = [threading.Thread(target=self._show_output, args=(host, process.stdout, True), daemon=True)]
        else:
            streams = ((process.stdout, self.console.file.fileno()), (process.stderr, _STDERR))
            readers = [threading.Thread(target=self._pass_output, args=(host, *pair), daemon=True) for pair in streams]
        for reader in readers:
            reader.start()
        return readers

    def _show_output(self, host: str, stream: IO[bytes], named: bool) -> None:
        """Body of a thread: show lines, if `named` after the name of their host, and keep them."""
        for line, is_overwritten in containers.split_pieces(_read_chunks(stream)):
            self.view.add(f"{host} | {line}" if named else line, self.log.add(host, line), is_overwritten)

    def _pass_output(self, host: str, stream: IO[bytes], target: int) -> None:
        """Body of a thread: copy the output of a host to a file descriptor at once, and keep its lines.

        A live view shows the lines instead, if the file is its terminal.
        """
        if self.view.is_live and os.isatty(target):
            self._show_output(host, stream, named=False)
            return
        for line in containers.split_lines(_copy_chunks(_read_chunks(stream), target)):
            self.log.add(host, line)

    def stop(self, hosts: Iterable[str]) -> None:
        """Stop hosts, all at the same time, and wait for them; an interrupt ends the wait."""
        stopping = [self._running[host] for host in hosts]
        for process, _ in stopping:
            process.terminate()
        for _, thread in stopping:
            thread.join()

    def kill(self) -> None:
        """Kill all hosts that still run, with their processes."""
        for process, _ in self._running.values():
            process.kill()
        for _, thread in self._running.values():
            thread.join()

    def has_result(self, host: str) -> bool:
        """Return whether `train` has written a result on a host."""
        return any((self.trees[host] / "output" / name).exists() for name in ("success", "failure"))

    def read_restarts(self, host: str) -> list[dict[str, Any]]:
        """Return the restarts that `train` has listed in job.json on a host; none if it has not."""
        try:
            return restarts.parse_restarts(read_file(self.trees[host] / "output" / "job.json", MOST_REPORT))
        except (OSError, ValueError):
            return []


def _read_chunks(stream: IO[bytes]) -> Iterator[bytes]:
    return iter(lambda: os.read(stream.fileno(), 1 << 16), b"")


def _copy_chunks(chunks: Iterable[bytes], target: int) -> Iterator[bytes]:
    """Yield the chunks, each after it was written to a file descriptor. After an error nothing more is written."""
    for chunk in chunks:
        try:
            rest = chunk
            while rest:
                rest = rest[os.write(target, rest) :]
        except OSError:  # the reader of our output has gone
            target = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        yield chunk


def kill_orphans(tree: Path) -> None:
    """Kill the processes of a host's tree that `train` has left, which have become children of this one.

    Others of this host become children when their parents end, and are killed then.
    """
    while orphans := [pid for pid in _list_children() if read_environment(pid).get(BASE) == str(tree)]:
        for pid in orphans:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _list_children() -> list[int]:
    files = Path("/proc/self/task").glob("*/children")
    return [int(pid) for file in files for pid in file.read_text().split()]
