"""Runs the processes of this host: set-up commands, the script or a launcher with its ranks, and sidecars.

Processes that a command leaves running are killed when it has ended.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence

from shoal_toolkit.errors import LaunchError
from shoal_toolkit.light_typing import Protocol
from shoal_toolkit.log import STDERR, STDOUT, write_log
from shoal_toolkit.output.lines import Lines, Tail
from shoal_toolkit.output.pipes import FlowControl, Source
from shoal_toolkit.plan.plan import LaunchPlan
from shoal_toolkit.run.ranks import LocalRanks, RankEvents, make_run_directory, remove_run_directory
from shoal_toolkit.system.loop import Loop
from shoal_toolkit.system.process import (
    MARK,
    find_descendants,
    find_marked,
    has_orphans,
    kill_left_behind,
    read_start_time,
    signal_group,
    signal_marked,
    signal_process,
    spawn,
)

_POLL_SECONDS = 0.1

# Returns the reader of a process's stdout (1) or stderr (2).
ReaderOf = Callable[[int], Callable[[bytes], None]]
OnSetUp = Callable[["LaunchError | None"], None]


class HostEvents(RankEvents, Protocol):
    """Called for events of the processes on this host, and of its ranks."""

    def on_launcher_output(self, stream: int, data: bytes) -> None:
        """The launcher, a set-up command or a sidecar wrote something."""

    def on_command_ended(self, code: int) -> None:
        """The script or launcher has ended, and all of its output was passed on."""

    def on_sidecar_ended(self, name: str, code: int) -> None:
        """A sidecar has ended, before the job or at its end."""


class HostProcesses:
    """The script or launcher of this host (one process at a time), its ranks, and its sidecars."""

    def __init__(
        self,
        loop: Loop,
        flow: FlowControl,
        plan: LaunchPlan,
        environ: Mapping[str, str],
        events: HostEvents,
        reads_all: bool = False,
    ) -> None:
        self._loop = loop
        self._flow = flow
        self._plan = plan
        self._environ = {**environ, **plan.env}
        self._events = events
        self._reads_all = reads_all  # no process may write to stdout and stderr of `train` itself
        self._mark = os.urandom(8).hex()
        self._sources: list[Source] = []
        self._ranks: LocalRanks | None = None
        self._sidecars: dict[int, tuple[str, list[Source]]] = {}  # pid → name, readers of its output
        self._setup: tuple[Sequence[str], Tail] = ((), Tail())  # the current command, and the end of its output
        self._on_end: Callable[[int], None] = events.on_command_ended
        self._pid = self._since = 0
        self._stopping = self._killed = False
        self.directory = ""  # the run directory, if ranks run here

    @property
    def running(self) -> bool:
        """Whether a set-up command, the script or the launcher runs."""
        return self._pid != 0

    @property
    def draining(self) -> bool:
        """Whether sidecars still run."""
        return bool(self._sidecars)

    def set_up(self, seconds: int, on_set_up: OnSetUp) -> None:
        """Starts the set-up commands, one after the other. The rest is not run after a failure.

        Args:
            seconds: The time limit for all of them; then the running one is killed.
            on_set_up: Called with None, or with the first failure. Without commands it is called at once.
        """
        limit = self._loop.call_later(seconds, lambda: self._on_setup_timeout(seconds, on_set_up))

        def finish(error: LaunchError | None) -> None:
            limit.cancel()
            on_set_up(error)

        self._start_next_setup(list(self._plan.setup), finish)

    def _start_next_setup(self, commands: list[tuple[str, ...]], finish: OnSetUp) -> None:
        """Starts the first command and, when it has succeeded, the next. Their output goes to the log.

        Calls `finish` with None after the last, or with the error of one that failed or did not start. After the last,
        a command that ends is reported as this host's own.
        """
        if not commands:
            self._on_end = self._events.on_command_ended
            finish(None)
            return
        command, tail = self._setup = (commands[0], Tail())

        def on_end(code: int) -> None:
            if code:
                finish(_explain_setup_failure(command, code, tail.text()))
            else:
                self._start_next_setup(commands[1:], finish)

        def reader_of(stream: int) -> Callable[[bytes], None]:
            def read(data: bytes) -> None:
                tail.add(data)
                self._events.on_launcher_output(stream, data)

            return read

        self._on_end = on_end
        try:
            self._start(command, {}, self._plan.cwd, reader_of)
        except LaunchError as error:
            finish(error)

    def _on_setup_timeout(self, seconds: int, on_set_up: OnSetUp) -> None:
        """Kills the running command, and reports the failure at once.

        A process that hangs in the kernel does not end even if it is killed.
        """
        command, tail = self._setup
        self._on_end = lambda _: None
        self.signal_launcher(signal.SIGKILL)
        on_set_up(
            LaunchError(
                f"The set-up before the launch did not end within {seconds} s, and was killed. "
                f"SHOAL_SETUP_TIMEOUT sets the limit.\nThis was running: {_format_command(command, tail.text())}"
            )
        )

    def start(self) -> None:
        """Starts this host's own command, launcher or script, and the sidecars. Raises LaunchError if it can't."""
        if self._plan.has_ranks:
            self.prepare_ranks()
            self.start_launcher(self._plan.command, {}, cwd=self._plan.cwd)
        else:
            self._start_script()

    def _start_script(self) -> None:
        """Starts the script without a launcher, then the sidecars, and reports its rank as started.

        The script writes to our stdout, if that need not be read; its stderr is always read, for the failure file.
        """
        rank = self._plan.rank_of(self._plan.current_host)

        def reader_of(stream: int) -> Callable[[bytes], None]:
            return lambda data: self._events.on_rank_output(stream, rank, data)

        if self._reads_all:
            self._start(self._plan.command, {}, self._plan.cwd, reader_of)
        else:
            error_read, error_write = os.pipe()
            self._sources = [Source(self._loop, self._flow, error_read, reader_of(STDERR))]
            self._spawn(self._plan.command, self._environ, self._plan.cwd, (STDOUT, error_write), [error_write])
        self._start_sidecars()
        self._events.on_rank_started(rank)

    def prepare_ranks(self) -> None:
        """Makes the run directory and its FIFOs, in which the ranks of this host report and write.

        Raises LaunchError if there is no directory for temporary files.
        """
        self.directory = make_run_directory()
        count = max(self._plan.ranks.values())
        self._ranks = LocalRanks(self._loop, self._flow, self.directory, count, self._events)

    def start_launcher(self, argv: Sequence[str], variables: Mapping[str, str], cwd: str = "/") -> None:
        """Starts mpirun, torchrun or a daemon of mpirun, and the sidecars.

        The shells of ranks get SHOAL_RUN_DIR and SHOAL_CODE_DIR.

        Args:
            argv: The command.
            variables: Variables to add to the environment.
            cwd: Its working directory. mpirun requires its own directory on every host, where the code may be
            elsewhere.
        """
        directories = {"SHOAL_RUN_DIR": self.directory, "SHOAL_CODE_DIR": self._plan.cwd}  # for the shells of ranks
        self._start(
            argv,
            {**variables, **directories},
            cwd,
            lambda stream: lambda data: self._events.on_launcher_output(stream, data),
        )
        self._start_sidecars()

    def _start(self, argv: Sequence[str], variables: Mapping[str, str], cwd: str, reader_of: ReaderOf) -> None:
        """Starts a process in pipes for stdout and stderr, which `reader_of` reads.

        Adds `variables` to the plan's environment.
        """
        self._sources, writes = self._make_pipes(reader_of)
        self._spawn(argv, {**self._environ, **variables}, cwd, (writes[0], writes[1]), writes)

    def _make_pipes(self, reader_of: ReaderOf) -> tuple[list[Source], list[int]]:
        """Makes pipes for stdout and stderr of a process. Returns their readers, and the ends to write to."""
        pipes = [os.pipe(), os.pipe()]
        sources = [
            Source(self._loop, self._flow, read, reader_of(stream))
            for stream, (read, _) in zip((STDOUT, STDERR), pipes)
        ]
        return sources, [write for _, write in pipes]

    def _start_sidecars(self) -> None:
        """Starts the sidecars.

        Their output goes to stdout and stderr of `train`, or through the log if that must be read.
        """

        def reader_of(stream: int) -> Callable[[bytes], None]:
            lines = Lines(b"")  # whole lines, because several processes write at once
            return lambda data: self._events.on_launcher_output(stream, lines.feed(data))

        for sidecar in self._plan.sidecars:
            sources, writes = self._make_pipes(reader_of) if self._reads_all else ([], [STDOUT, STDERR])
            # A sidecar that drains waits for SIGTERM. The signal may come before its Python is ready.
            blocked = (signal.SIGTERM,) if sidecar.drains else ()
            try:
                pid = spawn(sidecar.command, {**self._environ, **sidecar.env}, "/", writes[0], writes[1], blocked)
            finally:
                for fd in writes if sources else ():
                    os.close(fd)
            self._sidecars[pid] = (sidecar.name, sources)
            self._loop.on_child(pid, lambda code, pid=pid: self._on_sidecar_end(pid, code))  # type: ignore[misc]

    def _on_sidecar_end(self, pid: int, code: int) -> None:
        """Kills the processes that a sidecar left in its group, reads its last output, and reports its end."""
        name, sources = self._sidecars.pop(pid)
        signal_group(pid, signal.SIGKILL)
        for source in sources:
            source.finish()
        self._events.on_sidecar_ended(name, code)

    def end_sidecars(self) -> None:
        """Sends SIGTERM to sidecars that drain, and kills the others. Call it after the script has ended."""
        draining = {sidecar.name for sidecar in self._plan.sidecars if sidecar.drains}
        for pid, (name, _) in self._sidecars.items():
            signal_group(pid, signal.SIGTERM if name in draining else signal.SIGKILL)

    def stop(self, number: int) -> None:
        """Sends a signal that stops the job to this host's ranks, or to the script with the processes it started.

        They then have time to end.
        """
        self._stopping = True
        if self._ranks is not None:
            self._ranks.stop(number)
        elif self._pid:
            signal_group(self._pid, number)
            signal_marked(self._pid, self._mark, self._since, number)

    def signal_launcher(self, number: int) -> None:
        """Signals the script, launcher or set-up command itself, but not its ranks."""
        if self._pid:
            signal_group(self._pid, number)

    def kill(self) -> None:
        """Kills the running command's process group, but not the sidecars.

        If ranks are tracked, it also kills them and the command's descendants. Other processes are killed when the
        command has ended.
        """
        self._killed = True
        if self._pid and self._ranks is not None:
            self._ranks.signal(signal.SIGKILL)
            for pid in find_descendants(self._pid):  # ranks that have not reported their start
                signal_process(pid, signal.SIGKILL)
        self.signal_launcher(signal.SIGKILL)

    def close(self) -> None:
        """Kills the sidecars, reads the last output of the ranks, and removes the run directory."""
        for pid in self._sidecars:
            signal_group(pid, signal.SIGKILL)
        if self._ranks is not None:
            self._ranks.finish()
            self._ranks = None
        if self.directory:
            remove_run_directory(self.directory)
            self.directory = ""

    def _spawn(
        self, argv: Sequence[str], env: Mapping[str, str], cwd: str, outputs: tuple[int, int], to_close: list[int]
    ) -> None:
        """Starts this host's process, marked by a variable, and closes the descriptors `to_close`, also after an error.

        `_on_child_ended` is called when it has ended.
        """
        try:
            marks = f"{env.get(MARK, '')} {self._mark}".strip()
            self._pid = spawn(argv, {**env, MARK: marks}, cwd, stdout=outputs[0], stderr=outputs[1])
            self._since = int(read_start_time(self._pid) or self._since)
        finally:
            for fd in to_close:
                os.close(fd)
        self._loop.on_child(self._pid, self._on_child_ended)

    def _on_child_ended(self, code: int) -> None:
        """Kills the processes that the command left running, daemons too.

        Reads its last output, and reports its end with `code`.

        While child processes of a stopped script may save a checkpoint, it waits for them first. With ranks, LocalRanks
        does that. Killed processes of a script that was not stopped are logged.
        """
        if self._stopping and not self._killed and self._ranks is None and self._may_be_saving():
            self._loop.call_later(_POLL_SECONDS, lambda: self._on_child_ended(code))
            return
        if self._ranks is not None:
            signal_group(self._pid, signal.SIGKILL)
            self._ranks.signal(signal.SIGKILL)  # ranks have groups or sessions of their own
        left = kill_left_behind(self._pid, self._mark, self._since)
        if self._ranks is not None:
            self._ranks.finish()
        elif left and not (self._stopping or self._killed):
            more = f", and {len(left) - 3} more" if len(left) > 3 else ""
            write_log(f"the script has ended; processes that it left running are killed: {', '.join(left[:3])}{more}")
        for source in self._sources:
            source.finish()
        self._pid = 0
        self._on_end(code)

    def _may_be_saving(self) -> bool:
        """Whether child processes of a stopped script still run, and may save a checkpoint. A shell ends at once."""
        return has_orphans(self._pid) or bool(find_marked(self._mark, self._since))


def _explain_setup_failure(command: Sequence[str], code: int, output: str) -> LaunchError:
    """Returns the error for a set-up command that failed: pip's cause, the command and the end of its output."""
    from shoal_toolkit.result.pip_failure import explain_pip_failure

    reason = explain_pip_failure(output) or "it printed nothing"
    shown = _format_command(command, output)
    return LaunchError(f"{reason}\nBefore the launch, this command exited with code {code}: {shown}")


def _format_command(command: Sequence[str], output: str) -> str:
    """Returns a command and the last ten lines of its output, with masked secrets in the command."""
    from shoal_toolkit import redact

    lines = [line for line in output.splitlines() if line.strip()]
    return " ".join(redact.mask_arguments(command)) + "\n\n" + "\n".join(lines[-10:])
