"""Every host but the first: lets the first host in, runs what it asks for, and ends with its result."""

from __future__ import annotations

import signal

from shoal_toolkit.errors import LaunchError, TrainError
from shoal_toolkit.hosts import messages
from shoal_toolkit.hosts.agent import Agent
from shoal_toolkit.hosts.daemons import daemon_command
from shoal_toolkit.light_typing import TYPE_CHECKING, Any
from shoal_toolkit.log import say
from shoal_toolkit.output.daemonlog import DaemonLog
from shoal_toolkit.plan.plan import LaunchPlan
from shoal_toolkit.result import result
from shoal_toolkit.result.result import Result
from shoal_toolkit.run.host import Host, Task, companion_failure
from shoal_toolkit.run.ranks import STDERR

if TYPE_CHECKING:
    from shoal_toolkit.hosts.wire import Channel
    from shoal_toolkit.run.work import Work


class Worker(Host):
    """Follows the first host."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self._agent: Agent | None = None
        self._channel: Channel | None = None
        self._daemon = DaemonLog()
        self._first_host = task.hosts[0]
        self._has_ranks = isinstance(task.plan, LaunchPlan) and task.plan.has_ranks
        self._is_set_up = self._is_started = False
        self._problem: TrainError | None = None  # why this host cannot take part

    def begin(self) -> None:
        task = self.task
        current = task.cluster.current_host
        self._agent = Agent(
            self.loop, task.settings.port, task.settings.secret, task.hosts, current, self._first_host_came
        )
        self.loop.call_later(task.settings.hosts_timeout, self._too_late)
        if isinstance(task.plan, TrainError):
            self._set_up(task.plan)
        elif self.work is not None:
            self.work.set_up(task.settings.setup_timeout, self._set_up)

    def _set_up(self, error: TrainError | None) -> None:
        """This host is ready, or will never be."""
        self._is_set_up, self._problem = error is None, error
        if error is not None and self._channel is None:
            say(f"{error}\nTelling the first host {self._first_host}.")
        self._report()

    def _report(self) -> None:
        """Tell the first host whether this one is ready, once both are known."""
        if self._problem is not None:
            self._failed(self._problem)
        elif self._is_set_up:
            self._send(messages.READY)

    def _too_late(self) -> None:
        if self._channel is None:
            seconds = self.task.settings.hosts_timeout
            refused = self._agent.refused if self._agent is not None else ""
            late = LaunchError(
                f"The first host {self._first_host} has not connected within {seconds} s"
                + (f"; this host {refused}." if refused else ". Every host of resourceconfig.json must run `train`; ")
                + ("" if refused else "check its log. SHOAL_HOSTS_TIMEOUT sets the limit.")
            )
            self.decide(result.of_error(self._problem or late))

    def _first_host_came(self, channel: Channel) -> None:
        self._channel = channel
        channel.on_message = self._message
        channel.on_lost = self._lost
        channel.on_held = lambda held: self.flow.report(channel, held)
        self._report()

    def _lost(self, reason: str) -> None:
        self.decide(
            Result(1, f"The first host {self._first_host} was lost: {reason}. Its own log says why, if it still can.")
        )

    # What the first host says

    def _message(self, said: Any) -> None:
        """What the first host says, which has proved the secret. ProtocolError: it says what is not due."""
        if said == messages.GO:
            self._asked(None)
        elif isinstance(said, messages.Start):
            self._asked(said.command)
        elif isinstance(said, messages.Signal):
            self._pass_on(said.number)
        elif isinstance(said, messages.Decided):
            self.report.update(said.report)
            self.decide(Result(said.code, said.message))
        else:
            raise messages.ProtocolError(f"{type(said).__name__}, which a first host does not say")

    def _asked(self, command: str | None) -> None:
        """Start the script, or with a command mpirun's daemon: once, and only that of the two which the plan has."""
        plan, work = self.task.plan, self.work
        if work is None or self._problem is not None:
            return  # this host cannot, and has said so: the first host had not heard it yet
        assert isinstance(plan, LaunchPlan)
        if not self._is_set_up or self._is_started:
            raise messages.ProtocolError("a start for the second time, or before this host is ready")
        if plan.starts_alone(plan.current_host) != (command is None):
            raise messages.ProtocolError("a start of what is not in this host's plan")
        self._is_started = True
        try:
            self._start(plan, work, command)
        except TrainError as error:
            self._failed(error)

    def _start(self, plan: LaunchPlan, work: Work, command: str | None) -> None:
        if command is None:
            work.start()
            return
        work.prepare_ranks()
        argv, variables = daemon_command(command, plan.daemon, self.task.environ, work.directory)
        work.start_launcher(argv, variables)

    def _failed(self, error: TrainError) -> None:
        self._send(messages.Failed(error.exit_code, str(error)))

    def _pass_on(self, number: int) -> None:
        self.note_stop(number)
        if self.work is not None:
            self.work.stop(number)

    # What this host's work says

    def rank_started(self, rank: int) -> None:
        self._send(messages.Started(rank))

    def rank_ended(self, rank: int, code: int) -> None:
        self._send(messages.RankEnded(rank, code, self.facts() if code else {}))

    def companion_ended(self, name: str, code: int) -> None:
        if self.result is not None or self.stopped_by:
            return
        message = companion_failure(name, self.task.cluster.current_host, code)
        self._send(messages.Failed(code or 1, message))

    def rank_output(self, stream: int, rank: int, data: bytes) -> None:
        """Output of ranks goes to the first host; that of a plain process stays here, as on SageMaker."""
        if self._has_ranks:
            self._send(messages.Output(stream, rank, data))
            return
        self.output.rank(stream, rank, self.task.cluster.current_host, data)

    def launcher_said(self, stream: int, data: bytes) -> None:
        self.output.launcher(STDERR, self.task.cluster.current_host, self._daemon.feed(stream, data))

    def work_ended(self, code: int) -> None:
        plan = self.task.plan
        assert isinstance(plan, LaunchPlan)
        stderr = self._daemon.text() if self._has_ranks else self.output.tail(plan.rank_of(plan.current_host))
        failed, facts = self._daemon.failed_rank, self.facts() if code else {}
        unrecorded = "" if code else self._rehearse()
        self._send(messages.Ended(code, stderr, failed, facts, unrecorded))

    def _rehearse(self) -> str:
        """A host on which a success cannot be recorded says so, and why, while all of them can still fail."""
        try:
            result.rehearse(self.task.paths, self.report)
        except LaunchError as error:
            return str(error)
        return ""

    def _send(self, message: Any) -> None:
        if self._channel is not None:
            self._channel.send(message)

    # Stopping

    def stop(self, number: int) -> None:
        """The first host decides for all; without one there is nothing to stop."""
        if self._channel is None:
            self.decide(result.of_stop(number))
        else:
            self._send(messages.Stopping(number))

    def stop_again(self) -> None:
        self._send(messages.Stopping(self.stopped_by or signal.SIGTERM))

    def tell(self, decided: Result) -> None:
        """Closing the connection says that the result has been written here."""
        if self._channel is not None:
            self._channel.close()

    def close(self) -> None:
        if self._agent is not None:
            self._agent.close()
        if self._channel is not None:
            self._channel.close()
