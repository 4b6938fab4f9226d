"""The first host: finds the others, launches, watches, and decides for all. A job of one host has only this one.

It launches once every host is ready: connected, and set up. In the end: mpirun's exit code is that of the rank that
failed first; where every host starts its own command, the first rank or host that fails decides. Only then are the
others told, and the first host ends after they have heard it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from time import monotonic

from shoal_toolkit.errors import LaunchError, TrainError
from shoal_toolkit.light_typing import TYPE_CHECKING, Any
from shoal_toolkit.log import say
from shoal_toolkit.plan.launcher import SEVERAL_RANKS
from shoal_toolkit.plan.plan import LaunchPlan
from shoal_toolkit.result import result
from shoal_toolkit.result.result import Failure, Result
from shoal_toolkit.run.host import Host, Task, companion_failure
from shoal_toolkit.run.ranks import STDERR, STDOUT

if TYPE_CHECKING:  # imported when they are needed: sockets and hashes cost a job of one host too much
    from shoal_toolkit.hosts.connect import Search
    from shoal_toolkit.hosts.daemons import Answer, DaemonRequests
    from shoal_toolkit.hosts.messages import Ended
    from shoal_toolkit.hosts.wire import Channel
    from shoal_toolkit.output.daemonlog import DaemonLog

_LAST_WORDS_SECONDS = 5.0  # for the workers' last output after mpirun has ended, and for their farewell
_SAY_EVERY_SECONDS = 15.0
_DELIVERY_SECONDS = 30  # for hosts that start later than a failure before the launch


class FirstHost(Host):
    """Decides for all hosts."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self._search: Search | None = None
        self._requests: DaemonRequests | None = None
        self._channels: dict[str, Channel] = {}
        self._daemons: dict[str, Answer] = {}  # hosts on which mpirun's daemon runs
        self._facts: dict[str, Mapping[str, int]] = {}  # of workers: see oom.py
        self._launcher: DaemonLog | None = None
        self._failed_rank: int | None = None  # as a worker's daemon says
        self._host_of: dict[int, str] = {}  # ranks that have started
        self._codes: dict[int, int] = {}  # ranks that have ended → exit code
        self._pending: set[str] = set()  # hosts whose own command has not ended
        self._unready: set[str] = set(task.hosts)
        self._launched = False
        self._first_start = 0.0
        self._early: Result | None = None  # a failure before the launch, which all hosts shall hear
        self._told_to_stop: set[str] = set()
        self._launcher_code: int | None = None
        self._mpi_over = False
        self._unrecorded = ""  # why a worker could not record a success

    # Finding the others

    def begin(self) -> None:
        task = self.task
        if len(task.hosts) > 1:
            from shoal_toolkit.hosts.connect import Search

            settings = task.settings
            self._search = Search(
                self.loop,
                task.hosts,
                settings.port,
                settings.secret,
                self._found,
                lambda reason: self.decide(self._early or result.of_error(LaunchError(reason))),
                settings.hosts_timeout,
            )
            self.loop.call_later(_SAY_EVERY_SECONDS, self._say_who_sets_up)
        if isinstance(task.plan, TrainError):
            self._fail_early(result.of_error(task.plan))
        elif self.work is not None:
            self.work.set_up(task.settings.setup_timeout, self._set_up)

    def _set_up(self, error: LaunchError | None) -> None:
        if error is not None:
            self._fail_early(result.of_error(error))
        else:
            self._ready(self.task.cluster.current_host)

    def _ready(self, host: str) -> None:
        """A host can launch. The last one starts the job: nowhere does a script run in vain."""
        self._unready.discard(host)
        if not self._unready and self.result is None and self._early is None:
            self._launch()

    def _say_who_sets_up(self) -> None:
        """Connected, but not ready: a worker installs what the code asks for."""
        waiting = sorted(self._unready & self._channels.keys())
        if waiting:
            more = f" and {len(waiting) - 10} more" if len(waiting) > 10 else ""
            limit = self.task.settings.setup_timeout
            say(f"{', '.join(waiting[:10])}{more} still set up, for at most {limit} s (SHOAL_SETUP_TIMEOUT)")
        if self._unready:
            self.loop.call_later(_SAY_EVERY_SECONDS, self._say_who_sets_up)

    def _fail_early(self, failed: Result) -> None:
        """Decide, but let the hosts that are missing come and hear it: nobody shall wait for this one in vain."""
        if self.result is not None:
            return
        if self._search is None or not self._search.missing:
            self.decide(failed)
        elif self._early is None:
            self._early = failed
            self._search.limit(_DELIVERY_SECONDS)
            say(f"{failed.message}\nTelling the other hosts, for at most {_DELIVERY_SECONDS} s.")
            self.loop.call_later(_DELIVERY_SECONDS, lambda: self.decide(failed))

    def _found(self, host: str, channel: Channel) -> None:
        channel.on_message = partial(self._message, host)
        channel.on_lost = partial(self._lost, host)
        self._channels[host] = channel
        self.flow.add(channel)
        if self._search is not None and not self._search.missing and self.result is None and self._early is not None:
            self.decide(self._early)

    # Launching

    def _launch(self) -> None:
        try:
            self._start()
        except TrainError as error:
            self.decide(result.of_error(error))

    def _start(self) -> None:
        plan, work = self.task.plan, self.work
        assert isinstance(plan, LaunchPlan) and work is not None
        self._launched = True
        self._pending = {host for host in plan.hosts if plan.starts_alone(host)}
        self._tell_to_go()
        if plan.has_ranks:
            from shoal_toolkit.output.daemonlog import DaemonLog

            self._launcher = DaemonLog()
        if not plan.by_mpirun:
            work.start()
            return
        work.prepare_ranks()
        if len(plan.ranks) > 1:
            from shoal_toolkit.hosts.daemons import DaemonRequests

            self._requests = DaemonRequests(self.loop, work.directory, self._daemon_asked)
        from shoal_toolkit.plan.mpi import session_variables

        work.start_launcher(plan.command, session_variables(work.directory))

    def _tell_to_go(self) -> None:
        """The others that start their own command."""
        for host, channel in self._channels.items():
            if host in self._pending:
                from shoal_toolkit.hosts.messages import GO

                channel.send(GO)

    def _daemon_asked(self, host: str, command: str, answer: Answer) -> None:
        from shoal_toolkit.hosts.messages import Start

        channel = self._channels.get(host)
        if channel is None or host in self._daemons:
            say(f"mpirun asked for a daemon on {host!r}, which is lost, unknown or has one")
            answer(255)
            return
        self._daemons[host] = answer
        channel.send(Start(command))

    # While it runs

    def rank_started(self, rank: int) -> None:
        self._rank_started(self.task.cluster.current_host, rank)

    def _rank_started(self, host: str, rank: int) -> None:
        self._host_of[rank] = host
        if not self._first_start:
            self._first_start = monotonic()
            self.report["launch_seconds"] = round(self._first_start - self.task.began, 3)

    def rank_output(self, stream: int, rank: int, data: bytes) -> None:
        self.output.rank(stream, rank, self._host_of.get(rank, "?"), data)

    def launcher_said(self, stream: int, data: bytes) -> None:
        words = self._launcher.feed(stream, data) if self._launcher is not None else data
        self.output.launcher(stream, self.task.cluster.current_host, words)

    def _message(self, host: str, said: Any) -> None:
        """What a worker says, which has proved the secret. ProtocolError: it says what is not due."""
        from shoal_toolkit.hosts import messages

        if isinstance(said, messages.Failed):
            self._fail_early(Result(said.code or 1, f"On {host}: {said.message}"))
        elif isinstance(said, messages.Stopping):
            self._signalled_by(host, said.signal)
        elif said == messages.READY:
            if host not in self._unready:
                raise messages.ProtocolError("it is ready for the second time")
            self._ready(host)
        elif self._launched:
            self._work_message(host, said)
        else:
            raise messages.ProtocolError(f"{type(said).__name__} before the launch")

    def _work_message(self, host: str, said: Any) -> None:
        """What a worker says of its ranks, or of its own command."""
        from shoal_toolkit.hosts import messages

        if isinstance(said, messages.Output):
            self.rank_output(said.stream, said.rank, said.data)
        elif isinstance(said, messages.Started):
            self._rank_started(host, said.rank)
        elif isinstance(said, messages.RankEnded):
            self._facts[host] = said.facts or self._facts.get(host, {})
            self.rank_ended(said.rank, said.code)
        elif isinstance(said, messages.Ended):
            self._worker_ended(host, said)
        else:
            raise messages.ProtocolError(f"{type(said).__name__}, which a worker does not say")

    def _lost(self, host: str, reason: str) -> None:
        self.flow.remove(self._channels.pop(host))
        answer = self._daemons.pop(host, None)
        if answer:
            answer(255)
        if self.result is None:
            self._fail_early(Result(1, f"The host {host} was lost: {reason}. Its own log says why, if it still can."))

    # The end

    def _worker_ended(self, host: str, said: Ended) -> None:
        self._facts[host] = said.facts or self._facts.get(host, {})
        if said.unrecorded:
            self._unrecorded = self._unrecorded or f"On {host}: {said.unrecorded}"
        answer = self._daemons.pop(host, None)
        if answer:
            if self._failed_rank is None:
                self._failed_rank = said.failed_rank
            answer(said.code)
            self._end_of_mpi()
        elif host in self._pending:
            self._command_ended(host, said.code, said.stderr)

    def work_ended(self, code: int) -> None:
        plan = self.task.plan
        assert isinstance(plan, LaunchPlan)
        if not plan.by_mpirun:
            self._command_ended(self.task.cluster.current_host, code, self._launcher.text() if self._launcher else "")
            return
        self._launcher_code = code
        self.loop.call_later(_LAST_WORDS_SECONDS, self._daemons_are_late)
        self._end_of_mpi()

    def _command_ended(self, host: str, code: int, stderr: str) -> None:
        """A host's own command has ended: the script, or torchrun after its ranks."""
        plan = self.task.plan
        assert isinstance(plan, LaunchPlan)
        self._pending.discard(host)
        if plan.launcher in SEVERAL_RANKS and host not in plan.outside:
            if code and not self.stopped_by:
                self.decide(
                    result.of_failure(Failure(code, f"{plan.launcher} on {host}", plan.command, stderr, launcher=True))
                )
        else:
            rank = plan.rank_of(host)
            self.output.remember(rank, stderr)
            self.rank_ended(rank, code)
        self._check_end()

    def rank_ended(self, rank: int, code: int) -> None:
        """A rank has ended. mpirun sees that too, and ends the others; where it is not at work, that is up to us."""
        plan = self.task.plan
        assert isinstance(plan, LaunchPlan)
        self._codes[rank] = code
        if self.stopped_by:
            if self._host_of.keys() <= self._codes.keys():
                self.decide(result.of_stop(self.stopped_by))
        elif code and (not plan.by_mpirun or rank >= plan.world_size):
            self.decide(self._rank_failure(plan, rank, code))

    def companion_ended(self, name: str, code: int) -> None:
        host = self.task.cluster.current_host
        if not self.stopped_by:
            self.decide(Result(code or 1, companion_failure(name, host, code)))

    def _check_end(self) -> None:
        """The job is done once every host's own command, and mpirun, have ended."""
        plan = self.task.plan
        assert isinstance(plan, LaunchPlan)
        if self._pending or self.result is not None or (plan.by_mpirun and not self._mpi_over):
            return
        if self.stopped_by:
            self.decide(result.of_stop(self.stopped_by))
        elif not self._all_started(plan):
            self.decide(Result(1, self._not_started(plan)))
        elif self._unrecorded:
            self.decide(Result(1, self._unrecorded))
        else:
            self._warn_of_a_failure_that_a_shell_hides(plan)
            self.decide(Result(0))

    def _warn_of_a_failure_that_a_shell_hides(self, plan: LaunchPlan) -> None:
        """A shell goes on after a command that fails, and its exit code is that of its last one."""
        if not plan.script[0].endswith("sh"):
            return
        raised = (tail for tail in map(self.output.tail, range(plan.world_size)) if "Traceback (most" in tail)
        if tail := next(raised, ""):
            from shoal_toolkit.result import diagnosis

            say(
                f"the script has ended with exit code 0, and a command in it with an exception: "
                f"{diagnosis.last_words(tail, 1).head}\nFix: begin the script with `set -euo pipefail`, or handle it."
            )

    def _all_started(self, plan: LaunchPlan) -> bool:
        """Whether every rank has started. Under torchrun each host has as many as its own GPUs: it is asked for one."""
        if plan.by_mpirun:
            return all(rank in self._host_of for rank in range(plan.world_size))
        return set(plan.ranks) <= set(self._host_of.values())

    def _not_started(self, plan: LaunchPlan) -> str:
        program = "mpirun" if plan.by_mpirun else plan.launcher
        return f"{program} ended with exit code 0, and {len(self._host_of)} of {plan.world_size} ranks had started."

    def _daemons_are_late(self) -> None:
        for host in list(self._daemons):
            say(f"mpirun has ended, and its daemon on {host} has not within {_LAST_WORDS_SECONDS:.0f} s")
            self._daemons.pop(host)(255)
        self._end_of_mpi()

    def _end_of_mpi(self) -> None:
        """mpirun has ended, and every daemon's last output has come."""
        plan, code = self.task.plan, self._launcher_code
        if code is None or self._daemons or self.result is not None:
            return
        assert isinstance(plan, LaunchPlan)
        self._mpi_over = True
        rank = self._rank_that_failed()
        if (code or rank is not None) and not self.stopped_by:
            self.decide(self._mpi_failure(plan, rank, code or 1))  # MPI_Abort(256) ends mpirun with 0
        self._check_end()

    def _rank_that_failed(self) -> int | None:
        """Return the rank that failed first, as mpirun's state log has it."""
        assert self._launcher is not None
        return self._failed_rank if self._launcher.failed_rank is None else self._launcher.failed_rank

    def _mpi_failure(self, plan: LaunchPlan, rank: int | None, code: int) -> Result:
        assert self._launcher is not None
        if rank is None:
            said, reason = self._launcher.text(), self._launcher.reason()
            return result.of_failure(Failure(code, "mpirun", plan.command, said, launcher=True, reason=reason))
        cause = "" if self.output.tail(rank).strip() else self._launcher.cause()
        if cause:  # the rank's MPI spoke through mpirun
            from shoal_toolkit.output import daemonlog

            why = daemonlog.reason(cause)
            return result.of_failure(Failure(code, self._where(plan, rank), plan.script, cause, reason=why))
        return self._rank_failure(plan, rank, code)

    def _rank_failure(self, plan: LaunchPlan, rank: int, code: int) -> Result:
        host = self._host_of.get(rank, "")
        own = result.words_of_script(self.task.paths) if host == self.task.cluster.current_host else ""
        said, reason = own or self.output.tail(rank), own.partition("\n")[0]
        where, facts = self._where(plan, rank), self._facts_of(host)
        return result.of_failure(Failure(code, where, plan.script, said, facts, reason=reason))

    def _where(self, plan: LaunchPlan, rank: int) -> str:
        if rank >= plan.world_size:
            return f"the script on {self._host_of.get(rank, 'an unknown host')}, outside the distribution,"
        return f"rank {rank} on {self._host_of.get(rank, 'an unknown host')}"

    def _facts_of(self, host: str) -> Mapping[str, int]:
        return self.facts() if host == self.task.cluster.current_host else self._facts.get(host, {})

    # Stopping

    def _signalled_by(self, host: str, number: int) -> None:
        if host in self._told_to_stop:
            say(f"{host} was told to stop again: killing the ranks now")
            self.stop_again()
            return
        self._told_to_stop.add(host)
        say(f"{host} was told to stop")
        if self.note_stop(number):
            self.stop(number)

    def stop(self, number: int) -> None:
        plan, work = self.task.plan, self.work
        if work is None or not self._launched or not isinstance(plan, LaunchPlan):
            self.decide(result.of_stop(number))
            return
        self._signal_all(number)
        if plan.has_ranks and not self._all_started(plan):
            work.signal_launcher(number)  # ranks that have not started must not start any more
        self.loop.call_later(self.task.settings.stop_grace, self.stop_again)

    def stop_again(self) -> None:
        if self.result is None:
            self.decide(result.of_stop(self.stopped_by))

    def _signal_all(self, number: int) -> None:
        if self._channels:
            from shoal_toolkit.hosts.messages import Signal

            for channel in self._channels.values():
                channel.send(Signal(number))
        if self.work is not None:
            self.work.stop(number)

    # Afterwards

    def decide(self, decided: Result) -> None:
        if self.result is None:
            if self._first_start:
                self.report["training_seconds"] = round(monotonic() - self._first_start, 3)
            if self._launcher is not None:
                for stream in (STDOUT, STDERR):
                    self.output.launcher(stream, self.task.cluster.current_host, self._launcher.flush(stream))
        super().decide(decided)

    def tell(self, decided: Result) -> None:
        """Give every worker the result, and wait until they have it: they end after the launcher, with its code."""
        if self._search is not None:
            self._search.close()
        if not self._channels:
            return
        from shoal_toolkit.hosts.messages import Decided

        shared: dict[str, Any] = {
            key: value for key, value in self.report.items() if key not in ("current_host", "began")
        }
        for channel in self._channels.values():
            channel.send(Decided(decided.exit_code, decided.message, shared))
        late: list[bool] = []
        self.loop.call_later(_LAST_WORDS_SECONDS, lambda: late.append(True))
        self.loop.run_until(lambda: not self._channels or bool(late))
        for host in self._channels:
            say(f"{host} has not confirmed the result within {_LAST_WORDS_SECONDS:.0f} s")

    def close(self) -> None:
        if self._search is not None:
            self._search.close()
        if self._requests is not None:
            self._requests.close()
        for channel in self._channels.values():
            channel.close()
