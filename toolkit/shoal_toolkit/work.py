"""What runs on this host: the script itself, or mpirun (on a worker its daemon) with this host's ranks below it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from shoal_toolkit.loop import Loop
from shoal_toolkit.plan import LaunchPlan
from shoal_toolkit.process import kill_session, signal_group, spawn
from shoal_toolkit.ranks import STDERR, STDOUT, LocalRanks, make_run_directory, remove_run_directory
from shoal_toolkit.streams import Flow, Source


class Events(NamedTuple):
    """Whom to tell what."""

    started: Callable[[int], None]  # a rank starts
    output: Callable[[int, int, bytes], None]  # stream, rank, data
    said: Callable[[int, bytes], None]  # stream, data: the launcher's own words
    ended: Callable[[int], None]  # exit code of the process, after all of its output


class Work:
    """One process of this host and what is below it; started at most once."""

    def __init__(self, loop: Loop, flow: Flow, plan: LaunchPlan, environ: Mapping[str, str], events: Events) -> None:
        self._loop = loop
        self._flow = flow
        self._plan = plan
        self._environ = {**environ, **plan.env}
        self._events = events
        self._sources: list[Source] = []
        self._ranks: LocalRanks | None = None
        self._pid = 0
        self.directory = ""

    @property
    def running(self) -> bool:
        return self._pid != 0

    def start_script(self) -> None:
        """Run the script on its own. Its stdout is ours; its stderr passes through us, for the failure file."""
        rank = int(self._plan.env["RANK"])
        error_read, error_write = os.pipe()
        self._sources = [
            Source(self._loop, self._flow, error_read, lambda data: self._events.output(STDERR, rank, data))
        ]
        self._spawn(self._plan.script, self._environ, self._plan.cwd, (STDOUT, error_write), [error_write])
        self._events.started(rank)

    def prepare(self) -> None:
        """Make the private directory in which the ranks of this host report."""
        self.directory = make_run_directory()
        count = max(self._plan.ranks.values())
        self._ranks = LocalRanks(
            self._loop, self._flow, self.directory, count, self._events.started, self._events.output
        )

    def start_launcher(self, argv: Sequence[str], variables: Mapping[str, str]) -> None:
        """Run mpirun, or the daemon that it asked for, with some more variables."""
        outputs = [os.pipe(), os.pipe()]
        self._sources = [
            Source(self._loop, self._flow, read, self._sayer(stream))
            for stream, (read, _) in zip((STDOUT, STDERR), outputs)
        ]
        writes = [write for _, write in outputs]
        environ = {**self._environ, **variables, "SHOAL_RUN_DIR": self.directory}
        # mpirun asks for its own directory on every host, and the code may lie elsewhere there.
        self._spawn(argv, environ, "/", (writes[0], writes[1]), writes)

    def signal(self, number: int) -> None:
        """Pass a signal to the script, or to the ranks: mpirun itself would end them within a second."""
        if self._ranks is not None:
            self._ranks.signal(number)
        elif self._pid:
            signal_group(self._pid, number)

    def signal_launcher(self, number: int) -> None:
        """Signal the process itself, ranks or not."""
        if self._pid:
            signal_group(self._pid, number)

    def kill(self) -> None:
        """End everything now."""
        if self._ranks is not None:
            self._ranks.signal(signal.SIGKILL)
        self.signal_launcher(signal.SIGKILL)

    def close(self) -> None:
        """Remove the directory."""
        if self._ranks is not None:
            self._ranks.finish()
            self._ranks = None
        if self.directory:
            remove_run_directory(self.directory)
            self.directory = ""

    def _sayer(self, stream: int) -> Callable[[bytes], None]:
        return lambda data: self._events.said(stream, data)

    def _spawn(
        self, argv: Sequence[str], env: Mapping[str, str], cwd: str, outputs: tuple[int, int], ours: list[int]
    ) -> None:
        try:
            self._pid = spawn(argv, env, cwd, stdout=outputs[0], stderr=outputs[1])
        finally:
            for fd in ours:
                os.close(fd)
        self._loop.on_child(self._pid, self._ended)

    def _ended(self, code: int) -> None:
        # What the script or the launcher left behind ends with it: the job is over.
        signal_group(self._pid, signal.SIGKILL)
        if self._ranks is not None:
            kill_session(self._pid)  # each rank is a group of its own
            self._ranks.finish()
        for source in self._sources:
            source.finish()
        self._pid = 0
        self._events.ended(code)
