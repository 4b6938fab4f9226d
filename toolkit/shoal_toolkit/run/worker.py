"""A worker, every host but the first: waits for the first host, starts processes for it, and ends with its result."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence

from shoal_toolkit.errors import FAILED, HOST_LOST, LaunchError, TrainError
from shoal_toolkit.fast_typing import Any
from shoal_toolkit.hosts import messages
from shoal_toolkit.hosts.agent import Agent
from shoal_toolkit.hosts.daemons import build_daemon_command
from shoal_toolkit.hosts.wire import Channel
from shoal_toolkit.log import STDERR, write_log
from shoal_toolkit.output.mpirun_log import MpirunLog
from shoal_toolkit.preflight.check import Probe
from shoal_toolkit.preflight.facts import collect_facts
from shoal_toolkit.result.result import Result, check_writable
from shoal_toolkit.run.host import HostTask
from shoal_toolkit.run.launching import LaunchingHost, describe_sidecar_end
from shoal_toolkit.run.processes import HostProcesses


class Worker(LaunchingHost):
    """Follows the first host. It decides nothing itself, unless the first host is missing or lost."""

    def __init__(self, task: HostTask) -> None:
        super().__init__(task)
        self._agent: Agent | None = None
        self._channel: Channel | None = None
        self._daemon_log = MpirunLog()
        self._first_host = task.hosts[0]
        self._has_ranks = self.has_plan and self.plan.has_ranks
        self._is_set_up = self._is_started = False
        self._problem: TrainError | None = None  # why this host can't take part
        self._number = 0  # of the last restart
        self._restarted = False  # whether the first host has sent a Restart
        self._was_ready = False  # whether this host was ready before any Restart
        self._probe: Probe | None = None
        self._facts: dict[str, Any] = {}

    def begin(self) -> None:
        """Listens for the first host, and sets up this host. An error in the plan is reported when that connects.

        The job ends if it does not connect in time. Raises LaunchError if the port is taken.
        """
        settings, hosts = self.task.settings, self.task.hosts
        self._agent = Agent(self.loop, settings.port, settings.secret, hosts, self.name, self._on_first_host)
        self.loop.call_later(settings.hosts_timeout, self._on_timeout)
        if isinstance(self.task.plan, TrainError):
            self._on_set_up(self.task.plan)
        elif self.processes is not None:
            self.processes.set_up(settings.setup_timeout, self._on_set_up)

    def _on_set_up(self, error: TrainError | None) -> None:
        self._is_set_up, self._problem = error is None, error
        if error is not None and self._channel is None:
            write_log(f"{error}\nReporting this to the first host {self._first_host}.")
        self._report_state()

    def _report_state(self) -> None:
        """Reports that this host is ready or has failed. Before, it checks the port at which the ranks meet."""
        if self._problem is not None:
            self._report_failure(self._problem)
        elif self._is_set_up and self._restarted and self.processes is not None:
            self.processes.await_standby(lambda: self._send(messages.Ready(self._number)))
        elif self._is_set_up and self._channel is not None:
            env = self.plan.env
            self._probe = Probe(self.loop, env["MASTER_ADDR"], env["MASTER_PORT"], self._on_probed)
            self._facts = self.collect_ready_facts()  # while it connects

    def _on_probed(self, problem: str) -> None:
        if not self._restarted:
            self._send(messages.Facts({**self._facts, "port_problem": problem, "time": round(time.time(), 3)}))
            self._send(messages.Ready(0))
            self._was_ready = True

    def collect_ready_facts(self) -> dict[str, Any]:
        """Returns the facts about this host that must fit the other hosts' facts."""
        return collect_facts(self.task.paths, self.plan)

    def _on_timeout(self) -> None:
        if self._channel is None:
            refused = (self._agent.refused or self._agent.rejected) if self._agent is not None else ""
            why = f"; this host {refused}." if refused else ". Every host of the job must run `train`; "
            advice = "" if refused else "check its log. SHOAL_HOSTS_TIMEOUT sets the limit."
            seconds = self.task.settings.hosts_timeout
            late = f"The first host {self._first_host} has not connected within {seconds} s{why}{advice}"
            self.set_result(Result.from_error(self._problem or LaunchError(late)))

    def _on_first_host(self, channel: Channel) -> None:
        """Takes over the first host's connection, and reports whether this host is ready or has failed.

        From now on, output pauses while much of it waits to be sent there.
        """
        self._channel = channel
        channel.on_message = self._on_message
        channel.on_lost = self._on_lost
        channel.on_held = lambda held: self.flow.report(channel, held)
        self._report_state()

    def _on_lost(self, reason: str) -> None:
        lost = f"The first host {self._first_host} was lost: {reason}. Its own log says why, if it still can."
        self.set_result(Result(HOST_LOST, lost))

    def _on_message(self, message: Any) -> None:
        if message == messages.GO:
            self._start(None)
        elif isinstance(message, messages.StartDaemon):
            self._start(message.command)
        elif isinstance(message, messages.PrepareRestart):
            self._restart(message)
        elif isinstance(message, messages.NextHosts):
            self._plan_with(message.hosts)
        elif isinstance(message, messages.PassSignal) or message == messages.PAUSE:
            self._pass_signal(message)
        elif isinstance(message, messages.JobEnded):
            self.report.update(message.report)
            self.set_result(Result(message.code, message.message))
        else:
            raise messages.ProtocolError(f"{type(message).__name__}, which a first host does not send")

    def _pass_signal(self, message: Any) -> None:
        """Signals the ranks of this host. A signal from outside stops the job; PAUSE only ends this start of it."""
        number = int(signal.SIGTERM)
        if isinstance(message, messages.PassSignal):
            number = message.number
            self.note_stop(number)
        if self.processes is not None:
            self.processes.stop(number)

    def _restart(self, message: messages.PrepareRestart) -> None:
        """Ends the processes of this host. The number 0 says that the job has begun without this host."""
        from shoal_toolkit.run.restarts import make_variables

        if self._was_ready and not message.number:
            return
        self._number, self._restarted = message.number, True
        if self.processes is not None:
            self.processes.prepare_restart(make_variables(message.number, message.reason))
        if self.processes is None or not self._is_set_up:
            self._report_state()
            return
        self._is_started = False
        self.processes.end(self._on_set_up)

    def _plan_with(self, hosts: Sequence[str]) -> None:
        """Plans the next start with some hosts of the job. Reports an error. Raises ProtocolError for other hosts."""
        if self.name not in hosts or not set(hosts) <= set(self.task.hosts):
            raise messages.ProtocolError("hosts that are not in this job")
        try:
            if self.has_plan:
                self.replan_with(hosts)
        except TrainError as error:
            self._report_failure(error)

    def _start(self, command: str | None) -> None:
        """Starts the script (None) or mpirun's daemon. Raises ProtocolError for a start that is not allowed now."""
        if self.processes is None or self._problem is not None:
            return  # the first host sent this before it got our failure
        if not self._is_set_up or self._is_started:
            raise messages.ProtocolError("a start for the second time, or before this host is ready")
        if self.plan.runs_own_command(self.name) != (command is None):
            raise messages.ProtocolError("a start of something that is not in this host's plan")
        self._is_started = True
        self._daemon_log = MpirunLog()  # not sooner: the killed daemon of an earlier start names a rank that failed
        self.forget_earlier_start()
        try:
            self._start_processes(self.processes, command)
        except TrainError as error:
            self._report_failure(error)

    def _start_processes(self, processes: HostProcesses, command: str | None) -> None:
        """Starts this host's own command (None), or the daemon of mpirun's request. Raises TrainError."""
        if command is None:
            processes.start()
            return
        processes.prepare_ranks()
        directory = processes.directory
        argv, variables = build_daemon_command(command, self.plan.daemon, self.task.environ, directory)
        processes.start_launcher(argv, variables)

    def _report_failure(self, error: TrainError) -> None:
        self._send(messages.HostFailed(self._number, error.exit_code, str(error), restartable=False))

    def on_rank_started(self, rank: int) -> None:
        self._send(messages.RankStarted(rank))

    def on_rank_ended(self, rank: int, code: int) -> None:
        """Reports the end of a rank to the first host; after a failure, with facts about this host."""
        self._send(messages.RankEnded(rank, code, self.collect_facts() if code else {}))

    def on_sidecar_ended(self, name: str, code: int) -> None:
        """Reports a sidecar that ended before the job as a failure of this host.

        Does nothing if the job has a result, or is being stopped.
        """
        if self.result is None and not self.stopped_by:
            text = describe_sidecar_end(name, self.name, code)
            self._send(messages.HostFailed(self._number, code or FAILED, text, restartable=True))

    def on_rank_output(self, stream: int, rank: int, data: bytes) -> None:
        """Sends output of ranks to the first host. The output of a plain process stays here, as on SageMaker."""
        if self._has_ranks:
            self._send(messages.RankOutput(stream, rank, data))
        else:
            self.write_rank_output(stream, rank, self.name, data)

    def fail_rank(self, rank: int, result: Result) -> None:
        self._send(messages.HostFailed(self._number, result.exit_code, result.message, restartable=False))

    def on_launcher_output(self, stream: int, data: bytes) -> None:
        """Writes output of the launcher to stderr of this host, without mpirun's noise.

        Notes the rank that failed first.
        """
        self.output.write_launcher(STDERR, self.name, self._daemon_log.feed(stream, data))

    def on_command_ended(self, code: int) -> None:
        """Reports the end of this host's command to the first host, with the end of its stderr.

        After a failure it adds facts about this host. Before a success it writes job.json without an exit code, and
        reports why that is not possible.
        """
        stderr = self._daemon_log.text() if self._has_ranks else self.output.stderr_tail(self.plan.rank_of(self.name))
        facts = self.collect_facts() if code else {}
        unrecorded = "" if code else self._check_writable()
        self._send(messages.CommandEnded(code, stderr, self._daemon_log.failed_rank, facts, unrecorded))

    def _check_writable(self) -> str:
        """Writes job.json while the job can still fail on all hosts. Returns why that failed; empty if it did not."""
        try:
            check_writable(self.task.paths, self.report)
        except LaunchError as error:
            return str(error)
        return ""

    def _send(self, message: Any) -> None:
        if self._channel is not None:
            self._channel.send(message)

    def stop(self, number: int) -> None:
        """Reports the signal to the first host, which decides. Without a first host the job just ends."""
        if self._channel is None:
            self.set_result(Result.from_signal(number))
        else:
            self._send(messages.StopReceived(number))

    def kill(self) -> None:
        """Asks the first host to kill the job, by reporting a second signal."""
        self._send(messages.StopReceived(self.stopped_by or signal.SIGTERM))

    def send_result(self, result: Result) -> None:
        """Closes the connection, which confirms that the result has been written here."""
        if self._channel is not None:
            self._channel.close()

    def close(self) -> None:
        """Stops listening for the first host, and closes the connection to it."""
        if self._agent is not None:
            self._agent.close()
        if self._probe is not None:
            self._probe.close()
        if self._channel is not None:
            self._channel.close()
