"""Runs the processes of this host: set-up commands, the script or a launcher with its ranks, and sidecars.

Processes that a command leaves running are killed when it has ended.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from shoal_toolkit.errors import LaunchError
from shoal_toolkit.fast_typing import TYPE_CHECKING, Protocol
from shoal_toolkit.job.peer_filter import build_connection_variables
from shoal_toolkit.job.settings import RESTART_VARIABLES
from shoal_toolkit.log import STDERR, STDOUT, write_log
from shoal_toolkit.output.lines import Lines, Tail
from shoal_toolkit.output.pipes import FlowControl, Source
from shoal_toolkit.plan.plan import LaunchPlan
from shoal_toolkit.plan.rank_shell import NO_HOOKS, RANKS
from shoal_toolkit.run.ranks import LocalRanks, RankEvents, make_run_directory, remove_run_directory
from shoal_toolkit.run.script import HostScript
from shoal_toolkit.system.loop import Loop, Timer
from shoal_toolkit.system.process import kill_left_behind, signal_group, signal_process, spawn
from shoal_toolkit.system.process_tree import find_descendants

if TYPE_CHECKING:  # without restarts there is none
    from shoal_toolkit.run.standby import Standby
    from shoal_toolkit.run.warm import Warm

_KILL_SECONDS = 10.0

OnSetUp = Callable[["LaunchError | None"], None]


class HostEvents(RankEvents, Protocol):
    """Called for events of the processes on this host, and of its ranks."""

    def on_launcher_output(self, stream: int, data: bytes) -> None:
        """The launcher, a set-up command or a sidecar wrote something."""

    def on_sidecar_ended(self, name: str, code: int) -> None:
        """A sidecar has ended, before the job or at its end."""


class HostProcesses(HostScript):
    """The set-up commands, then the script or launcher of this host, its ranks, and its sidecars."""

    def __init__(
        self,
        loop: Loop,
        flow: FlowControl,
        plan: LaunchPlan,
        environ: Mapping[str, str],
        events: HostEvents,
        reads_all: bool = False,
    ) -> None:
        self._events = events
        self._ranks: LocalRanks | None = None
        self._sidecars: dict[int, tuple[str, list[Source]]] = {}  # pid → name, readers of its output
        self._setup: tuple[Sequence[str], Tail] = ((), Tail())  # the current command, and the end of its output
        self._limit = Timer(0, lambda: None)  # for the end before a restart
        self.directory = ""  # the run directory, if ranks run here
        self._standby: Standby | None = None
        self._forks = False  # the standby starts the command, if there is one
        environ = {**environ, **build_connection_variables(plan.env)}
        super().__init__(loop, flow, plan, environ, events, reads_all)

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
            if self._standby is not None and self._plan.forks_ranks:
                self._standby.start_now()
            finish(None)
            return
        command, tail = self._setup = (commands[0], Tail())

        def on_end(code: int) -> None:
            if code:
                from shoal_toolkit.result.setup_failure import explain_setup_failure  # slow to import

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
            self._start_with_pipes(command, self._plan.setup_env, self._plan.cwd, reader_of)
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

    def keep_standby(self) -> None:
        """Has a standby start this host's command, if it can (standby.py): ranks always, a script again."""
        if self._plan.can_fork and self._standby is None:
            from shoal_toolkit.run.standby import Standby

            self._standby = Standby(self._loop, self._plan, self._environ)

    def adopt_standby(self, warm: Warm) -> None:
        """Has a standby from before the job start this host's command. If it cannot fork the command, it ends."""
        if warm.fits(self._plan, self._environ):
            self.keep_standby()
            assert self._standby is not None  # `fits` has checked that the script can be forked
            self._standby.adopt(warm.process)
        else:
            warm.process.end()

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
            self._standby.prepare()

    def _start_command(self) -> None:
        """Starts this host's own command and the sidecars. Raises LaunchError if it can't."""
        if self._plan.has_ranks:
            self.prepare_ranks()
            self.start_launcher(self._plan.command, {}, cwd=self._plan.cwd)
        else:
            super().start()
            self._start_sidecars()

    def prepare_ranks(self) -> None:
        """Makes the run directory and its FIFOs, in which the ranks of this host report and write.

        Raises LaunchError if there is no directory for temporary files.
        """
        self.directory = make_run_directory()
        count = max(self._plan.ranks.values())
        self._ranks = LocalRanks(self._loop, self._flow, self.directory, count, self._events)
        if self._standby is not None:
            self._standby.add_links(self.directory)

    def start_launcher(self, argv: Sequence[str], variables: Mapping[str, str], cwd: str = "/") -> None:
        """Starts mpirun, torchrun or a daemon of mpirun, and the sidecars.

        The shells of ranks get SHOAL_RUN_DIR and SHOAL_CODE_DIR.

        Args:
            cwd: Its working directory. mpirun requires its own directory on every host, where the code may be
            elsewhere.
        """
        directories = {"SHOAL_RUN_DIR": self.directory, "SHOAL_CODE_DIR": self._plan.cwd}  # for the shells of ranks
        if self._plan.by_mpirun and not any(name.startswith("UCX_MEM_") for name in self._environ):
            directories.update([NO_HOOKS])
        if self._plan.forks_ranks and not self._plan.by_mpirun:
            from shoal_toolkit.run.standby import list_rank_variables

            directories[RANKS] = json.dumps(list_rank_variables(self._plan))

        def reader_of(stream: int) -> Callable[[bytes], None]:
            def read(data: bytes) -> None:
                if self._ranks is not None:
                    self._ranks.read_reports()  # a rank reports its end before the launcher writes about it
                self._events.on_launcher_output(stream, data)

            return read

        self._start_with_pipes(
            argv,
            {**variables, **directories},
            cwd,
            reader_of,
            # Slurm signals all processes of a node. mpirun would kill its ranks at once. It unblocks signals for them.
            blocked=(signal.SIGTERM,) if self._plan.by_mpirun else (),
        )
        self._start_sidecars()

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
        else:
            super().stop(number)

    def pass_on(self, number: int) -> int:
        """Signals the processes of the script on this host that handle a signal. Returns their number."""
        return self._ranks.pass_on(number) if self._ranks is not None else super().pass_on(number)

    def signal_launcher(self, number: int) -> None:
        """Signals the script, launcher or set-up command itself, but not its ranks.

        mpirun gets SIGINT instead of SIGTERM, which `start_launcher` has blocked for it. Both end it.
        """
        is_blocked = self._plan.by_mpirun and self._ranks is not None and number == signal.SIGTERM
        super().signal_launcher(signal.SIGINT if is_blocked else number)

    def kill(self) -> None:
        """Kills the running command's process group, but not the sidecars.

        If ranks are tracked, it also kills them and the command's descendants. Other processes are killed when the
        command has ended.
        """
        if self._standby is not None:
            self._standby.cancel_wait()
        if self._pid and self._ranks is not None:
            self._ranks.signal(signal.SIGKILL)
            for pid in find_descendants(self._pid):  # ranks that have not reported their start
                signal_process(pid, signal.SIGKILL)
        super().kill()

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

    def prepare_restart(self, variables: Mapping[str, str]) -> None:
        """Adds variables to the environment of the next start."""
        self._environ.update(variables)

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
            if self._standby is not None and self._plan.forks_ranks:
                self._standby.start_now()  # if it has ended
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
            remove_run_directory(self.directory)
            self.directory = ""

    def _start_process(
        self, argv: Sequence[str], env: Mapping[str, str], cwd: str, outputs: tuple[int, int], blocked: Sequence[int]
    ) -> int:
        """Starts a process, or has the standby fork it. Returns its pid."""
        standby = self._standby if self._forks else None
        if standby is not None:
            if pid := standby.fork(env, outputs, self.directory):
                self._mark = standby.mark
                return pid
            if self._plan.forks_ranks:
                write_log("the standby has ended or does not answer: the ranks import their packages themselves")
        return super()._start_process(argv, env, cwd, outputs, blocked)

    def _on_child_ended(self, code: int) -> None:
        """Kills the processes that the command left running, and reports its end with `code`."""
        if self._ranks is None:
            super()._on_child_ended(code)
            return
        # Child processes may save a checkpoint: LocalRanks waits for them.
        signal_group(self._pid, signal.SIGKILL)
        self._ranks.signal(signal.SIGKILL)  # ranks have groups or sessions of their own
        kill_left_behind(self._pid, self._mark, self._since)
        if self._standby is not None:
            kill_left_behind(self._pid, self._standby.mark, self._since, spared=self._standby.pid)
        self._ranks.finish()
        self._report_end(code)


def _finish_sources(sources: Sequence[Source], _: int) -> None:
    for source in sources:
        source.finish()
