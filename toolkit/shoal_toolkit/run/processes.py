"""Runs the processes of this host: set-up commands, the script or a launcher with its ranks, and sidecars.

Processes that a command leaves running are killed when it has ended.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from shoal_toolkit.errors import LaunchError
from shoal_toolkit.job.peer_filter import build_connection_variables
from shoal_toolkit.job.settings import RESTART_VARIABLES
from shoal_toolkit.log import STDERR, STDOUT, write_log
from shoal_toolkit.output.lines import Lines, Tail
from shoal_toolkit.output.pipes import FlowControl, Source
from shoal_toolkit.plan.plan import LaunchPlan
from shoal_toolkit.run.events import HostEvents
from shoal_toolkit.system.loop import Loop, Timer
from shoal_toolkit.system.process import (
    MARK,
    find_descendants,
    find_marked,
    has_orphans,
    kill_left_behind,
    read_start_time,
    signal_group,
    signal_handlers,
    signal_marked,
    signal_process,
    spawn,
)

if TYPE_CHECKING:  # a script without a launcher and restarts needs neither
    from shoal_toolkit.run.ranks import LocalRanks
    from shoal_toolkit.run.standby import Standby

_POLL_SECONDS = 0.1
_KILL_SECONDS = 10.0

# Returns the reader of a process's stdout (1) or stderr (2).
ReaderOf = Callable[[int], Callable[[bytes], None]]
OnSetUp = Callable[["LaunchError | None"], None]


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
        self._given = {**environ, **build_connection_variables(plan.env)}
        self._environ = self._add_plan(plan)
        self._events = events
        self._reads_all = reads_all  # no process may write to stdout and stderr of `train` itself
        self._own_mark = self._mark = os.urandom(8).hex()  # of the commands of this process, of the current command
        self._sources: list[Source] = []
        self._ranks: LocalRanks | None = None
        self._sidecars: dict[int, tuple[str, list[Source]]] = {}  # pid → name, readers of its output
        self._setup: tuple[Sequence[str], Tail] = ((), Tail())  # the current command, and the end of its output
        self._on_end: Callable[[int], None] = events.on_command_ended
        self._pid = self._since = 0
        self._stopping = self._killed = False
        self._limit = Timer(0, lambda: None)  # for the end before a restart
        self.directory = ""  # the run directory, if ranks run here
        self._standby: Standby | None = None
        self._forks = False  # the standby starts the command, if there is one
        self._has_torchrun = True  # after a restart the hosts may have none, if they keep standbys

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
        """Starts the first command and, when it has succeeded, the next. Their output goes to the log."""
        if not commands:
            self._on_end = self._events.on_command_ended
            finish(None)
            return
        command, tail = self._setup = (commands[0], Tail())

        def on_end(code: int) -> None:
            if code:
                from shoal_toolkit.result.setup_failure import explain_setup_failure

                finish(explain_setup_failure(command, code, tail.text()))
            else:
                self._start_next_setup(commands[1:], finish)

        def reader_of(stream: int) -> Callable[[bytes], None]:
            def read(data: bytes) -> None:
                tail.add(data)
                self._events.on_launcher_output(stream, data)

            return read

        self._on_end = on_end
        try:
            self._start(command, self._plan.setup_env, self._plan.cwd, reader_of)
        except LaunchError as error:
            finish(error)

    def _on_setup_timeout(self, seconds: int, on_set_up: OnSetUp) -> None:
        """Kills the command without a wait: a process that hangs in the kernel does not end."""
        from shoal_toolkit.result.setup_failure import format_command

        command, tail = self._setup
        self._on_end = lambda _: None
        self.signal_launcher(signal.SIGKILL)
        on_set_up(
            LaunchError(
                f"The set-up before the launch did not end within {seconds} s, and was killed. "
                f"SHOAL_SETUP_TIMEOUT sets the limit.\nThis was running: {format_command(command, tail.text())}"
            )
        )

    def keep_standby(self, wanted: bool) -> None:
        """Has a standby start this host's command again, if it can (standby.py)."""
        from shoal_toolkit.run.standby import Standby, can_fork

        if not wanted or not can_fork(self._plan):
            self._standby = None
        elif self._standby is None:
            self._standby = Standby(self._loop, self._plan, self._environ)

    def start(self) -> None:
        """Starts this host's own command, launcher or script, and the sidecars. Raises LaunchError if it can't.

        If a standby is importing frameworks, the command starts when that is ready.
        """
        if self._standby is None:
            self._start_command()
        else:
            self._standby.when_ready(self._start_with_standby)

    def _start_with_standby(self, _: bool) -> None:
        """Starts this host's own command. One that can't be started is reported as ended with 1."""
        self._forks = True
        try:
            self._start_command()
        except LaunchError as error:
            write_log(str(error))
            self._events.on_command_ended(1)
        finally:
            self._forks = False
        if self._standby is not None and self._pid:
            self._standby.prepare(self._pid)

    def _start_command(self) -> None:
        """Starts this host's own command and the sidecars. Raises LaunchError if it can't."""
        if self._plan.has_ranks:
            self.prepare_ranks()
            self.start_launcher(self._plan.command, {}, cwd=self._plan.cwd)
        else:
            self._start_script()

    def _start_script(self) -> None:
        """Starts the script and the sidecars. The script's stderr is always read, for the failure file."""
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
        from shoal_toolkit.run.ranks import LocalRanks, make_run_directory

        self.directory = make_run_directory()
        count = max(self._plan.ranks.values())
        self._ranks = LocalRanks(self._loop, self._flow, self.directory, count, self._events)

    def start_launcher(self, argv: Sequence[str], variables: Mapping[str, str], cwd: str = "/") -> None:
        """Starts mpirun, torchrun or a daemon of mpirun, and the sidecars.

        The shells of ranks get SHOAL_RUN_DIR and SHOAL_CODE_DIR.

        Args:
            cwd: Its working directory. mpirun requires its own directory on every host, where the code may be
            elsewhere.
        """
        directories = {"SHOAL_RUN_DIR": self.directory, "SHOAL_CODE_DIR": self._plan.cwd}  # for the shells of ranks

        def reader_of(stream: int) -> Callable[[bytes], None]:
            def read(data: bytes) -> None:
                if self._ranks is not None:
                    self._ranks.read_reports()  # a rank reports its end before the launcher writes about it
                self._events.on_launcher_output(stream, data)

            return read

        self._start(
            argv,
            {**variables, **directories},
            cwd,
            reader_of,
            # Slurm signals all processes of a node. mpirun would kill its ranks at once. It unblocks signals for them.
            blocked=(signal.SIGTERM,) if self._plan.by_mpirun else (),
        )
        self._start_sidecars()

    def _start(
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

    def _start_sidecars(self) -> None:
        """Starts the sidecars that don't run yet. They write to our stdout, unless the log must be read."""

        def reader_of(stream: int) -> Callable[[bytes], None]:
            lines = Lines(b"")  # whole lines, because several processes write at once
            return lambda data: self._events.on_launcher_output(stream, lines.feed(data))

        running = {name for name, _ in self._sidecars.values()}  # those that drain, after a restart
        for sidecar in self._plan.sidecars:
            if sidecar.name in running:
                continue
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

        They then have time to end. A command that waits for the standby is not started, and counts as ended.
        """
        self._stopping = True
        if self._standby is not None and self._standby.cancel_wait():
            self._events.on_command_ended(128 + number)
            return
        if self._ranks is not None:
            self._ranks.stop(number)
        elif self._pid:
            signal_group(self._pid, number)
            signal_marked(self._pid, self._mark, self._since, number)

    def pass_on(self, number: int) -> int:
        """Signals the processes of the script on this host that handle a signal. Returns their number."""
        if self._ranks is not None:
            return self._ranks.pass_on(number)
        return signal_handlers(self._pid, number) if self._pid else 0

    def signal_launcher(self, number: int) -> None:
        """Signals the script, launcher or set-up command itself, but not its ranks.

        mpirun gets SIGINT instead of SIGTERM, which `start_launcher` has blocked for it. Both end it.
        """
        if self._pid:
            is_blocked = self._plan.by_mpirun and self._ranks is not None and number == signal.SIGTERM
            signal_group(self._pid, signal.SIGINT if is_blocked else number)

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

    def _add_plan(self, plan: LaunchPlan) -> dict[str, str]:
        return {**{name: self._given[name] for name in self._given if name not in plan.removed}, **plan.env}

    def replace_plan(self, plan: LaunchPlan) -> None:
        """Makes the next start use another plan, with the variables of the last restart."""
        restart = {name: self._environ[name] for name in RESTART_VARIABLES if name in self._environ}
        self._plan = plan
        self._environ = {**self._add_plan(plan), **restart}
        if self._standby is not None:
            self._standby.plan = plan

    def await_standby(self, on_ready: Callable[[], None]) -> None:
        """Calls back at once, or when a standby that is importing can fork: other hosts then need not wait for it."""
        if self._standby is None:
            on_ready()
        else:
            self._standby.when_ready(lambda _: on_ready())

    def prepare_restart(self, variables: Mapping[str, str], standby: bool) -> None:
        """Adds variables to the environment of the next start.

        If standbys fork the ranks on all hosts, starts the one of this host in case that it has none yet.
        """
        self._environ.update(variables)
        self.keep_standby(standby)
        if self._standby is not None and self._plan.has_ranks:
            self._has_torchrun = False
            self._standby.start_now()

    def end(self, on_ended: OnSetUp) -> None:
        """Kills the command, its ranks and the sidecars that don't drain, so that the host can start again.

        Args:
            on_ended: Called with None when nothing is left, or with an error if a process still runs after 10 s.
        """
        self._limit.cancel()
        if self._standby is not None:
            self._standby.cancel_wait()

        def finish(_: int) -> None:
            self._limit.cancel()
            self._forget_command()
            on_ended(None)

        hangs = LaunchError("A process does not end although it was killed, so that the job cannot start again.")
        self._limit = self._loop.call_later(_KILL_SECONDS, lambda: on_ended(hangs))
        self._on_end = finish
        if self.running:
            self.kill()
        else:
            self._limit.cancel()
            self._limit = self._loop.call_later(0, lambda: finish(0))

    def _forget_command(self) -> None:
        """Resets what belongs to the command that has ended, and kills the sidecars that don't drain."""
        self._stopping = self._killed = False
        self._on_end = self._events.on_command_ended
        self._close_ranks()
        draining = {sidecar.name for sidecar in self._plan.sidecars if sidecar.drains}
        for pid in [pid for pid, (name, _) in self._sidecars.items() if name not in draining]:
            _, sources = self._sidecars.pop(pid)
            signal_group(pid, signal.SIGKILL)
            self._loop.on_child(pid, partial(_finish_sources, sources))

    def close(self) -> None:
        """Kills the sidecars and the standby, reads the last output of the ranks, and removes the run directory."""
        for pid in self._sidecars:
            signal_group(pid, signal.SIGKILL)
        if self._standby is not None:
            self._standby.close()
        self._close_ranks()

    def _close_ranks(self) -> None:
        if self._ranks is not None:
            self._ranks.finish()
            self._ranks = None
        if self.directory:
            from shoal_toolkit.run.ranks import remove_run_directory

            remove_run_directory(self.directory)
            self.directory = ""

    def _spawn(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        cwd: str,
        outputs: tuple[int, int],
        to_close: list[int],
        blocked: Sequence[int] = (),
    ) -> None:
        """Starts this host's process, marked by a variable. Closes `to_close`, also after an error."""
        try:
            standby = self._standby if self._forks else None
            if standby is not None and (pid := standby.fork(env, outputs, self.directory)):
                self._pid, self._mark = pid, standby.mark
            else:
                if standby is not None and not self._has_torchrun:
                    write_log("the standby has ended or does not answer: the ranks import their packages themselves")
                    argv, env = standby.build_cold_start(env, self.directory)
                self._mark = self._own_mark
                marks = f"{env.get(MARK, '')} {self._mark}".strip()
                self._pid = spawn(argv, {**env, MARK: marks}, cwd, *outputs, blocked)
            self._since = int(read_start_time(self._pid) or self._since)
        finally:
            for fd in to_close:
                os.close(fd)
        self._loop.on_child(self._pid, self._on_child_ended)

    def _on_child_ended(self, code: int) -> None:
        """Kills the processes that the command left running, and reports its end with `code`."""
        # Child processes may save a checkpoint. With ranks, LocalRanks waits for them.
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


def _finish_sources(sources: Sequence[Source], _: int) -> None:
    for source in sources:
        source.finish()
