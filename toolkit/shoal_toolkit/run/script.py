"""Runs the script of this host as one process, without a launcher. Kills the processes that it leaves running."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence

from shoal_toolkit.fast_typing import Protocol
from shoal_toolkit.log import STDERR, STDOUT, write_log
from shoal_toolkit.output.pipes import FlowControl, Source
from shoal_toolkit.plan.plan import LaunchPlan
from shoal_toolkit.system.loop import Loop
from shoal_toolkit.system.process import (
    MARK,
    find_marked,
    kill_left_behind,
    read_start_time,
    signal_group,
    spawn,
)

_POLL_SECONDS = 0.1

# Returns the reader of a process's stdout (1) or stderr (2).
ReaderOf = Callable[[int], Callable[[bytes], None]]


class ScriptEvents(Protocol):
    """Called for events of the script on this host."""

    def on_rank_started(self, rank: int) -> None:
        """A rank has started."""

    def on_rank_output(self, stream: int, rank: int, data: bytes) -> None:
        """A rank wrote something to stdout (1) or stderr (2)."""

    def on_command_ended(self, code: int) -> None:
        """The script or launcher has ended, and all of its output was passed on."""


class HostScript:
    """The script of this host, one process at a time. HostProcesses adds everything that few jobs have."""

    def __init__(
        self,
        loop: Loop,
        flow: FlowControl,
        plan: LaunchPlan,
        environ: Mapping[str, str],
        events: ScriptEvents,
        reads_all: bool = False,
    ) -> None:
        self._loop = loop
        self._flow = flow
        self._plan = plan
        self._given = dict(environ)
        self._environ = self._add_plan(plan)
        self._script_events = events
        self._reads_all = reads_all  # no process may write to stdout and stderr of `train` itself
        self._own_mark = self._mark = os.urandom(8).hex()  # of the commands of this process, of the current command
        self._sources: list[Source] = []
        self._on_end: Callable[[int], None] = events.on_command_ended
        self._pid = self._since = 0
        self._stopping = self._killed = False

    @property
    def running(self) -> bool:
        """Whether a set-up command, the script or the launcher runs."""
        return self._pid != 0

    @property
    def pid(self) -> int:
        """The pid of the running command; 0 if there is none."""
        return self._pid

    def _add_plan(self, plan: LaunchPlan) -> dict[str, str]:
        return {**{name: self._given[name] for name in self._given if name not in plan.removed}, **plan.env}

    def start(self) -> None:
        """Starts the script. Its stderr is always read, for the failure file. Raises LaunchError if it can't."""
        rank = self._plan.rank_of(self._plan.current_host)

        def reader_of(stream: int) -> Callable[[bytes], None]:
            return lambda data: self._script_events.on_rank_output(stream, rank, data)

        if self._reads_all:
            self._start_with_pipes(self._plan.command, {}, self._plan.cwd, reader_of)
        else:
            error_read, error_write = os.pipe()
            self._sources = [Source(self._loop, self._flow, error_read, reader_of(STDERR))]
            self._spawn(self._plan.command, self._environ, self._plan.cwd, (STDOUT, error_write), [error_write])
        self._script_events.on_rank_started(rank)

    def _start_with_pipes(
        self,
        argv: Sequence[str],
        variables: Mapping[str, str],
        cwd: str,
        reader_of: ReaderOf,
        blocked: Sequence[int] = (),
    ) -> None:
        """Starts a process with pipes that `reader_of` reads. Adds `variables` to the plan's environment."""
        self._sources, writes = self._make_pipes(reader_of)
        self._spawn(argv, {**self._environ, **variables}, cwd, (writes[0], writes[1]), writes, blocked)

    def _make_pipes(self, reader_of: ReaderOf) -> tuple[list[Source], list[int]]:
        """Makes pipes for stdout and stderr of a process. Returns their readers, and the ends to write to."""
        pipes = [os.pipe(), os.pipe()]
        sources = [
            Source(self._loop, self._flow, read, reader_of(stream))
            for stream, (read, _) in zip((STDOUT, STDERR), pipes)
        ]
        return sources, [write for _, write in pipes]

    def _spawn(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        cwd: str,
        outputs: tuple[int, int],
        to_close: list[int],
        blocked: Sequence[int] = (),
    ) -> None:
        """Starts this host's process. Closes `to_close`, also after an error."""
        try:
            self._pid = self._start_process(argv, env, cwd, outputs, blocked)
            self._since = int(read_start_time(self._pid) or self._since)
        finally:
            for fd in to_close:
                os.close(fd)
        self._loop.on_child(self._pid, self._on_child_ended)

    def _start_process(
        self, argv: Sequence[str], env: Mapping[str, str], cwd: str, outputs: tuple[int, int], blocked: Sequence[int]
    ) -> int:
        """Starts a process, marked by a variable. Returns its pid."""
        self._mark = self._own_mark
        marks = f"{env.get(MARK, '')} {self._mark}".strip()
        return spawn(argv, {**env, MARK: marks}, cwd, *outputs, blocked)

    def stop(self, number: int) -> None:
        """Sends a signal that stops the job to the script and the processes it started. They then have time to end."""
        self._stopping = True
        if self._pid:
            from shoal_toolkit.system.process_tree import signal_marked

            signal_group(self._pid, number)
            signal_marked(self._pid, self._mark, self._since, number)

    def pass_on(self, number: int) -> int:
        """Signals the processes of the script on this host that handle a signal. Returns their number."""
        from shoal_toolkit.system.process_tree import signal_handlers

        return signal_handlers(self._pid, number) if self._pid else 0

    def signal_launcher(self, number: int) -> None:
        """Signals the script, launcher or set-up command itself."""
        if self._pid:
            signal_group(self._pid, number)

    def kill(self) -> None:
        """Kills the running command's process group. Other processes are killed when the command has ended."""
        self._killed = True
        self.signal_launcher(signal.SIGKILL)

    def close(self) -> None:
        """Does nothing: only HostProcesses has more than the script."""

    def _on_child_ended(self, code: int) -> None:
        """Kills the processes that the command left running, and reports its end with `code`."""
        if self._stopping and not self._killed and self._may_be_saving():
            self._loop.call_later(_POLL_SECONDS, lambda: self._on_child_ended(code))
            return
        left = kill_left_behind(self._pid, self._mark, self._since)
        if left and not (self._stopping or self._killed):
            more = f", and {len(left) - 3} more" if len(left) > 3 else ""
            write_log(f"the script has ended; processes that it left running are killed: {', '.join(left[:3])}{more}")
        self._report_end(code)

    def _may_be_saving(self) -> bool:
        """Whether child processes of a stopped script still run, and may save a checkpoint. A shell ends at once."""
        from shoal_toolkit.system.process_tree import has_orphans

        return has_orphans(self._pid) or bool(find_marked(self._mark, self._since))

    def _report_end(self, code: int) -> None:
        for source in self._sources:
            source.finish()
        self._pid = 0
        self._on_end(code)
