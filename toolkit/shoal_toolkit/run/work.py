"""What runs on this host: the script itself, or a launcher (on a worker maybe mpirun's daemon) with ranks below it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence

from shoal_toolkit.errors import LaunchError
from shoal_toolkit.light_typing import NamedTuple
from shoal_toolkit.log import say
from shoal_toolkit.output.streams import Flow, Lines, Source, Tail
from shoal_toolkit.plan.plan import LaunchPlan
from shoal_toolkit.run.ranks import STDERR, STDOUT, LocalRanks, make_run_directory, remove_run_directory
from shoal_toolkit.system.loop import Loop
from shoal_toolkit.system.process import (
    MARK,
    descendants,
    kill_left_behind,
    marked,
    orphans_run,
    signal_group,
    signal_marked,
    signal_process,
    spawn,
    start_time,
)

_LOOK_AGAIN_SECONDS = 0.1


class Events(NamedTuple):
    """Whom to tell what."""

    started: Callable[[int], None]  # a rank starts
    rank_ended: Callable[[int, int], None]  # a rank that a launcher started has ended: rank, exit code
    output: Callable[[int, int, bytes], None]  # stream, rank, data
    said: Callable[[int, bytes], None]  # stream, data: the launcher's own words
    ended: Callable[[int], None]  # exit code of the process, after all of its output
    companion_ended: Callable[[str, int], None]  # one that should have run as long as the job: name, exit code


class Work:
    """One process of this host at a time, what is below it and beside it."""

    def __init__(
        self,
        loop: Loop,
        flow: Flow,
        plan: LaunchPlan,
        environ: Mapping[str, str],
        events: Events,
        reads_all: bool = False,
    ) -> None:
        self._loop = loop
        self._reads_all = reads_all  # no process writes to our stdout and stderr itself
        self._flow = flow
        self._plan = plan
        self._environ = {**environ, **plan.env}
        self._mark = os.urandom(8).hex()
        self._events = events
        self._sources: list[Source] = []
        self._ranks: LocalRanks | None = None
        self._companions: dict[int, str] = {}  # pid → name
        self._companion_sources: dict[int, list[Source]] = {}
        self._setting_up: tuple[Sequence[str], Tail] = ((), Tail())  # the command, and what it printed
        self._on_end: Callable[[int], None] = events.ended
        self._pid = self._since = 0
        self._stopping = self._killed = False
        self.directory = ""

    @property
    def running(self) -> bool:
        return self._pid != 0

    @property
    def draining(self) -> bool:
        """Whether companions still finish what they have begun."""
        return bool(self._companions)

    def set_up(self, seconds: int, done: Callable[[LaunchError | None], None]) -> None:
        """Run the commands that come before the launch, one after the other; `done` gets None, or what failed.

        seconds: How long all of them may take together. What still runs then is killed.
        """
        limit = self._loop.call_later(seconds, lambda: self._setup_late(seconds, done))

        def over(error: LaunchError | None) -> None:
            limit.cancel()
            done(error)

        self._set_up_next(list(self._plan.setup), over)

    def _set_up_next(self, commands: list[tuple[str, ...]], done: Callable[[LaunchError | None], None]) -> None:
        if not commands:
            self._on_end = self._events.ended
            done(None)
            return
        command, tail = self._setting_up = (commands[0], Tail())

        def ended(code: int) -> None:
            if code:
                done(LaunchError(_setup_failure(command, code, tail.text())))
            else:
                self._set_up_next(commands[1:], done)

        self._on_end = ended
        try:
            self._start(command, {}, self._plan.cwd, lambda stream: self._setup_reader(stream, tail))
        except LaunchError as error:
            done(error)

    def _setup_late(self, seconds: int, done: Callable[[LaunchError | None], None]) -> None:
        """Say so at once: a process that hangs in the kernel does not even end when it is killed."""
        command, tail = self._setting_up
        self._on_end = lambda _: None
        self.signal_launcher(signal.SIGKILL)
        done(
            LaunchError(
                f"The set-up before the launch has not ended within {seconds} s, and is killed. "
                f"SHOAL_SETUP_TIMEOUT sets the limit.\nThis was running: {_shown(command, tail.text())}"
            )
        )

    def _setup_reader(self, stream: int, tail: Tail) -> Callable[[bytes], None]:
        def read(data: bytes) -> None:
            tail.add(data)
            self._events.said(stream, data)

        return read

    def start(self) -> None:
        """Run this host's own command: a launcher, or the script."""
        if self._plan.has_ranks:
            self.prepare_ranks()
            self.start_launcher(self._plan.command, {}, cwd=self._plan.cwd)
        else:
            self._start_script()

    def _start_script(self) -> None:
        """Run the script on its own. Its stdout is ours; its stderr passes through us, for the failure file."""
        rank = self._plan.rank_of(self._plan.current_host)

        def reader(stream: int) -> Callable[[bytes], None]:
            return lambda data: self._events.output(stream, rank, data)

        if self._reads_all:
            self._start(self._plan.command, {}, self._plan.cwd, reader)
        else:
            error_read, error_write = os.pipe()
            self._sources = [Source(self._loop, self._flow, error_read, reader(STDERR))]
            self._spawn(self._plan.command, self._environ, self._plan.cwd, (STDOUT, error_write), [error_write])
        self._start_companions()
        self._events.started(rank)

    def prepare_ranks(self) -> None:
        """Make the private directory in which the ranks of this host report."""
        self.directory = make_run_directory()
        self._ranks = LocalRanks(
            self._loop,
            self._flow,
            self.directory,
            max(self._plan.ranks.values()),
            self._events.started,
            self._events.rank_ended,
            self._events.output,
        )

    def start_launcher(self, argv: Sequence[str], variables: Mapping[str, str], cwd: str = "/") -> None:
        """Run mpirun, torchrun, or the daemon that mpirun asked for, with some more variables.

        In `/` where mpirun has a say: it asks for its own directory on every host; the code may lie elsewhere there.
        """
        places = {"SHOAL_RUN_DIR": self.directory, "SHOAL_CODE_DIR": self._plan.cwd}  # for the ranks' shells
        self._start(argv, {**variables, **places}, cwd, self._sayer)
        self._start_companions()

    def _start(
        self,
        argv: Sequence[str],
        variables: Mapping[str, str],
        cwd: str,
        reader: Callable[[int], Callable[[bytes], None]],
    ) -> None:
        self._sources, writes = self._pipes(reader)
        self._spawn(argv, {**self._environ, **variables}, cwd, (writes[0], writes[1]), writes)

    def _pipes(self, reader: Callable[[int], Callable[[bytes], None]]) -> tuple[list[Source], list[int]]:
        """Make a pipe each for stdout and stderr of a process; returns who reads them, and what it writes to."""
        outputs = [os.pipe(), os.pipe()]
        sources = [
            Source(self._loop, self._flow, read, reader(stream)) for stream, (read, _) in zip((STDOUT, STDERR), outputs)
        ]
        return sources, [write for _, write in outputs]

    # Companions

    def _start_companions(self) -> None:
        for companion in self._plan.companions:
            sources, writes = self._pipes(self._line_sayer) if self._reads_all else ([], [STDOUT, STDERR])
            environ = {**self._environ, **companion.env}
            # One that drains waits for the signal itself; it could come before its Python is up.
            blocked = (signal.SIGTERM,) if companion.drains else ()
            try:
                pid = spawn(companion.command, environ, "/", writes[0], writes[1], blocked)
            finally:
                for fd in writes if sources else ():
                    os.close(fd)
            self._companions[pid] = companion.name
            self._companion_sources[pid] = sources
            self._loop.on_child(pid, lambda code, pid=pid: self._companion_ended(pid, code))  # type: ignore[misc]

    def _companion_ended(self, pid: int, code: int) -> None:
        name = self._companions.pop(pid)
        signal_group(pid, signal.SIGKILL)
        for source in self._companion_sources.pop(pid):
            source.finish()
        self._events.companion_ended(name, code)

    def end_companions(self) -> None:
        """The script has ended: those that drain are told to, the others are killed."""
        draining = {companion.name for companion in self._plan.companions if companion.drains}
        for pid, name in self._companions.items():
            signal_group(pid, signal.SIGTERM if name in draining else signal.SIGKILL)

    # Signals

    def stop(self, number: int) -> None:
        """Pass on a signal that stops the job: the script, or each rank, has time to end."""
        self._stopping = True
        if self._ranks is not None:
            self._ranks.stop(number)
        elif self._pid:
            signal_group(self._pid, number)
            signal_marked(self._pid, self._mark, self._since, number)

    def signal_launcher(self, number: int) -> None:
        """Signal the process itself, ranks or not."""
        if self._pid:
            signal_group(self._pid, number)

    def kill(self) -> None:
        """End everything now, but for companions that drain."""
        self._killed = True
        if self._pid and self._ranks is not None:
            self._ranks.signal(signal.SIGKILL)
            for pid in descendants(self._pid):  # ranks that have not said that they start
                signal_process(pid, signal.SIGKILL)
        self.signal_launcher(signal.SIGKILL)

    def close(self) -> None:
        """Remove the directory, and end what is left."""
        for pid in self._companions:
            signal_group(pid, signal.SIGKILL)
        if self._ranks is not None:
            self._ranks.finish()
            self._ranks = None
        if self.directory:
            remove_run_directory(self.directory)
            self.directory = ""

    def _sayer(self, stream: int) -> Callable[[bytes], None]:
        return lambda data: self._events.said(stream, data)

    def _line_sayer(self, stream: int) -> Callable[[bytes], None]:
        """Whole lines: several speak at once."""
        lines = Lines(b"")
        return lambda data: self._events.said(stream, lines.feed(data))

    def _spawn(
        self, argv: Sequence[str], env: Mapping[str, str], cwd: str, outputs: tuple[int, int], ours: list[int]
    ) -> None:
        try:
            marks = f"{env.get(MARK, '')} {self._mark}".strip()
            self._pid = spawn(argv, {**env, MARK: marks}, cwd, stdout=outputs[0], stderr=outputs[1])
            self._since = int(start_time(self._pid) or self._since)
        finally:
            for fd in ours:
                os.close(fd)
        self._loop.on_child(self._pid, self._ended)

    def _ended(self, code: int) -> None:
        if self._stopping and not self._killed and self._ranks is None and self._still_saves():
            self._loop.call_later(_LOOK_AGAIN_SECONDS, lambda: self._ended(code))
            return
        # What the script or the launcher left behind ends with it: the job is over.
        if self._ranks is not None:
            signal_group(self._pid, signal.SIGKILL)
            self._ranks.signal(signal.SIGKILL)
        # Daemons too; ranks have a group, or a session, of their own.
        left = kill_left_behind(self._pid, self._mark, self._since)
        if left and self._ranks is None and not (self._stopping or self._killed):
            more = f", and {len(left) - 3} more" if len(left) > 3 else ""
            say(f"the script has ended, and what it left running is ended with it: {', '.join(left[:3])}{more}")
        if self._ranks is not None:
            self._ranks.finish()
        for source in self._sources:
            source.finish()
        self._pid = 0
        self._on_end(code)

    def _still_saves(self) -> bool:
        """A shell dies of the signal at once; what it has started may be saving. The grace period bounds it."""
        return orphans_run(self._pid) or bool(marked(self._mark, self._since))


def _setup_failure(command: Sequence[str], code: int, output: str) -> str:
    from shoal_toolkit.result import pip_failure

    reason = pip_failure.describe(output) or "it printed nothing"
    return f"{reason}\nBefore the launch, this exited with code {code}: {_shown(command, output)}"


def _shown(command: Sequence[str], output: str) -> str:
    """Return a command, and the last lines that it printed."""
    from shoal_toolkit import redact

    lines = [line for line in output.splitlines() if line.strip()]
    return " ".join(redact.arguments(command)) + "\n\n" + "\n".join(lines[-10:])
