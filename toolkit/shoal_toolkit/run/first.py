"""The first host: connects to the others, launches, watches, and decides for all. A job of one host has only this role.

It launches once every host is ready: connected, and set up. The result: mpirun ends with the exit code of the rank that
failed first. If every host starts its own command, the first rank or host that fails decides. The other hosts get the
result then, and the first host ends after they have confirmed it.

A restart (SHOAL_MAX_RESTARTS) goes back to the time before the launch. Every host ends its processes, and reports that
it is ready again; lost hosts are looked for. Before that report, messages of a host are about the earlier start.

An elastic job (SHOAL_MIN_HOSTS) restarts with the hosts left. When another host is ready, the ranks get time to save
their state, and all hosts start again.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from functools import partial
from time import monotonic

from shoal_toolkit.errors import FAILED, HOST_LOST, SUCCESS, LaunchError, TrainError
from shoal_toolkit.light_typing import TYPE_CHECKING, Any
from shoal_toolkit.log import STDERR, STDOUT, write_log
from shoal_toolkit.result.result import Failure, Result
from shoal_toolkit.run.gathering import Gathering
from shoal_toolkit.run.host import Host, Task, describe_sidecar_end
from shoal_toolkit.run.rank_table import RankTable, explain

if TYPE_CHECKING:  # imported when needed: sockets and hashes take too long for a job of one host
    from shoal_toolkit.hosts.daemons import DaemonRequests, SendExitCode
    from shoal_toolkit.hosts.messages import CommandEnded, HostFailed, Ready
    from shoal_toolkit.hosts.wire import Channel
    from shoal_toolkit.output.mpirun_log import MpirunLog
    from shoal_toolkit.run.preflight import Preflight
    from shoal_toolkit.run.restarts import Restarts
    from shoal_toolkit.system.loop import Timer

_FAREWELL_SECONDS = 5.0  # for the workers' last output after the end of mpirun, and to confirm the result
_DELIVERY_SECONDS = 30  # for hosts that start later than a failure before the launch


class FirstHost(Host):
    """Leads the job."""

    _ranks: RankTable  # from the launch on

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self._requests: DaemonRequests | None = None
        self._channels: dict[str, Channel] = {}
        self._daemons: dict[str, SendExitCode] = {}  # hosts on which a daemon of mpirun runs
        self._mpirun_log: MpirunLog | None = None
        self._failed_rank: int | None = None  # as the daemon of a worker logged
        self._final_rank: int | None = None  # the first that failed, if that does not restart the job
        self._pending: set[str] = set()  # hosts with a command of their own that has not ended
        self._gathering = Gathering(self.loop, task, self._on_found, self._on_search_limit)
        self._members = self._gathering.members
        self._launched = False
        self._first_start = 0.0
        self._early: Result | None = None  # a failure before the launch, to be sent to all hosts
        self._stopped_hosts: set[str] = set()
        self._mpirun_code: int | None = None
        self._unrecorded = ""  # why a worker can't write a success
        self._preflight: Preflight | None = None  # for several hosts
        self._farewell: Timer | None = None  # for the daemons of a mpirun that has ended
        self._restarts: Restarts | None = None
        self._growing_since = 0.0  # time.monotonic(), while ranks end so that more hosts can take part
        if task.may_restart:
            from shoal_toolkit.run.restarts import Restarts

            self._restarts = Restarts(task.settings, task.paths, self.report)

    # Connecting and setting up

    def begin(self) -> None:
        """Starts to connect to the workers and to set up this host. An error in the plan is reported to them.

        If a worker isn't found in time, the job fails. If there are workers and a plan, it starts the preflight, which
        opens MASTER_PORT.
        """
        task = self.task
        if len(task.hosts) > 1:
            self._gathering.search()
            if self.has_plan:
                from shoal_toolkit.run.preflight import Preflight

                self._preflight = Preflight(task.paths, self.plan, one_kind=len(task.cluster.instance_groups) < 2)
                self.loop.call_later(0, self._preflight.collect)
        if isinstance(task.plan, TrainError):
            self._fail_early(Result.from_error(task.plan))
        elif self.processes is not None:
            self.processes.set_up(task.settings.setup_timeout, self._on_set_up)

    def _on_search_limit(self, reason: str) -> None:
        """Begins an elastic job with the hosts that have come, if they are enough. Otherwise the job fails."""
        if self._early is None and self._members.expect_present():
            count = len(self._channels) + 1
            write_log(f"beginning with {count} of {len(self.task.hosts)} hosts (SHOAL_MIN_HOSTS). {reason}")
            self._launch_if_ready()
            return
        code = HOST_LOST if self._members.number else FAILED  # a host did not come back
        self.set_result(self._early or Result(code, reason))

    def _on_set_up(self, error: LaunchError | None) -> None:
        """Fails the job if the set-up of this host failed, otherwise counts this host as ready."""
        if error is not None:
            self._fail_early(Result.from_error(error))
        else:
            self._on_ready(self.name)

    def _on_ready(self, host: str) -> None:
        """Notes that a host can launch, or that the job can grow by it. Raises ValueError if it was ready before."""
        self._members.note_ready(host)
        if self._launched:
            self._grow_if_possible()
        else:
            self._launch_if_ready()

    def _launch_if_ready(self) -> None:
        """Starts the job once all hosts that take part are ready, so that no script runs if a host fails before."""
        if not self._launched and self._members.are_ready and self.result is None and self._early is None:
            try:
                self._launch()
            except TrainError as error:
                self.set_result(Result.from_error(error))

    def _fail_early(self, result: Result) -> None:
        """Fails the job. Hosts that are still missing have 30 s to connect, so that no host waits out its timeout.

        After the launch no host is missing, and the job ends at once.
        """
        if self.result is not None:
            return
        if not self._gathering.is_searching or self._members.current:
            self.set_result(result)
        elif self._early is None:
            self._early = result
            self._gathering.announce_limit(_DELIVERY_SECONDS)
            write_log(
                f"{result.message}\nWaiting for the other hosts, to report this to them, at most {_DELIVERY_SECONDS} s."
            )
            self.loop.call_later(_DELIVERY_SECONDS, lambda: self.set_result(result))

    def _on_found(self, host: str, channel: Channel) -> None:
        """Takes over a worker's connection. The last one sends an earlier failure to all.

        A host that came for a restart, or to a job that runs, has to know the number of the last restart.
        """
        channel.on_message = partial(self._on_message, host)
        channel.on_lost = partial(self._on_lost, host)
        self._channels[host] = channel
        self.flow.add(channel)
        if self._members.current:
            write_log(f"{host} has come back")
            self._send_restart(channel)
        if not self._gathering.is_searching and self.result is None and self._early is not None:
            self.set_result(self._early)

    # Launching

    def _launch(self) -> None:
        """Launches the job: starts the script or launcher here, and tells hosts with commands of their own to start.

        An elastic job is planned for the hosts that are ready.

        Before the first launch, it logs the findings of the preflight and closes MASTER_PORT. It listens for mpirun's
        requests to start daemons on other hosts. Raises TrainError if a process can't be started.
        """
        self._launched = True
        self._plan_start(self._members.start())
        plan, processes = self.plan, self.processes
        assert processes is not None
        if self._preflight is not None:
            self._preflight.log_findings()
            self._preflight = None
        self.forget_earlier_start()
        self._ranks = RankTable(plan, self.output, self.task.paths)
        self._pending = {host for host in plan.hosts if plan.runs_own_command(host)}
        for host, channel in self._channels.items():
            if host in self._pending:
                from shoal_toolkit.hosts.messages import GO

                channel.send(GO)
        if plan.has_ranks:
            from shoal_toolkit.output.mpirun_log import MpirunLog

            self._mpirun_log = MpirunLog()
        if not plan.by_mpirun:
            processes.start()
            return
        processes.prepare_ranks()
        if len(plan.ranks) > 1:
            from shoal_toolkit.hosts.daemons import DaemonRequests

            self._requests = DaemonRequests(self.loop, processes.directory, self._channels, self._on_daemon_request)
        from shoal_toolkit.plan.mpi import set_session_directory

        processes.start_launcher(plan.command, set_session_directory(processes.directory))

    def _plan_start(self, hosts: Sequence[str]) -> None:
        """Plans the start of an elastic job, here and on the other hosts. Raises TrainError if that fails here."""
        if not self._members.are_elastic:
            return
        from shoal_toolkit.hosts.messages import Members as Message

        self.plan_with(hosts)
        for host, channel in self._channels.items():
            if host in hosts:
                channel.send(Message(hosts))

    def _on_daemon_request(self, host: str, command: str, send_exit_code: SendExitCode) -> None:
        """Passes mpirun's request on to a worker.

        mpirun's agent gets the exit code of the daemon, or 0 when a rank runs there. From then on mpirun has a
        connection to the daemon, and notices its end. For a host that is lost, 255 is sent at once.
        """
        from shoal_toolkit.hosts.messages import Start

        channel = self._channels.get(host)
        if channel is None:
            write_log(f"mpirun requested a daemon on {host!r}, which is lost")
            send_exit_code(255)
            return
        self._daemons[host] = send_exit_code
        channel.send(Start(command))

    # While it runs

    def on_rank_started(self, rank: int) -> None:
        if self._launched:
            self._note_start(self.name, rank)

    def _note_start(self, host: str, rank: int) -> None:
        """Notes the host of a rank, and answers mpirun's request for a daemon there with 0.

        The first start sets `launch_seconds` in the report, which began with the job. The last one ends a restart.
        """
        self._ranks.host_of[rank] = host
        if host in self._daemons:
            self._daemons[host](0)
        if not self._first_start:
            self._first_start = monotonic()
            self.report["launch_seconds"] = round(self._first_start - self.task.began, 3)
        if self._restarts is not None and self._ranks.all_started:
            self._restarts.finish()
            self._grow_if_possible()

    def on_rank_output(self, stream: int, rank: int, data: bytes) -> None:
        self.write_rank_output(stream, rank, self._ranks.host_of.get(rank, "?"), data)

    def fail_rank(self, rank: int, result: Result) -> None:
        if self._launched and not self._growing_since:
            self._fail(result, rank=rank)

    def on_launcher_output(self, stream: int, data: bytes) -> None:
        """Writes output of the launcher without mpirun's noise. The lines left out say which rank failed.

        The notices of a mpirun that is killed for a restart are dropped.
        """
        if self._mpirun_log is not None and not self._launched:
            return
        kept = self._mpirun_log.feed(stream, data) if self._mpirun_log is not None else data
        self.output.write_launcher(stream, self.name, kept)

    def _on_message(self, host: str, message: Any) -> None:
        """Handles a message from an authenticated worker: ready, failed, stopped, or after the launch about its ranks.

        Messages about an earlier start are dropped, except output. Raises ProtocolError if it is wrong at this time.
        """
        from shoal_toolkit.hosts import messages

        if isinstance(message, (messages.HostFailed, messages.Ready)):
            if message.number == self._members.number:
                self._on_state(host, message)
        elif isinstance(message, messages.StopReceived):
            self._on_stopped_host(host, message.signal)
        elif isinstance(message, messages.Facts):
            if self._preflight is not None:  # without a plan there is none, and a worker has facts all the same
                self._preflight.add(host, message.facts)
        elif self._members.current:
            self._on_rank_message(host, message)
        else:
            raise messages.ProtocolError(f"{type(message).__name__} before the launch")

    def _on_state(self, host: str, message: HostFailed | Ready) -> None:
        """Notes a worker that is ready. Fails or restarts the job if it can't take part.

        Raises ProtocolError if it is ready for the second time.
        """
        from shoal_toolkit.hosts.messages import ProtocolError, Ready

        if isinstance(message, Ready):
            try:
                self._on_ready(host)
            except ValueError as error:
                raise ProtocolError(str(error)) from None
            return
        result = Result(message.code or FAILED, f"On {host}: {message.message}")
        if self._members.current and not self._members.needs(host):
            self._dismiss(host, result)
        elif self._launched and message.restartable:
            self._fail(result, host=host)
        else:
            self._fail_early(result)

    def _on_rank_message(self, host: str, message: Any) -> None:
        """Handles a worker's message about its ranks, or about its own command. Raises ProtocolError for another."""
        from shoal_toolkit.hosts import messages

        if isinstance(message, messages.Output):
            self.on_rank_output(message.stream, message.rank, message.data)
        elif not self._launched:
            return  # about an earlier start
        elif isinstance(message, messages.RankStarted):
            self._note_start(host, message.rank)
        elif isinstance(message, messages.RankEnded):
            self._ranks.add_facts(host, message.facts)
            self._note_end(message.rank, message.code)
        elif isinstance(message, messages.CommandEnded):
            self._on_worker_ended(host, message)
        else:
            raise messages.ProtocolError(f"{type(message).__name__}, which a worker does not send")

    def _on_lost(self, host: str, reason: str) -> None:
        """Forgets a worker after its connection was lost, and answers mpirun's request for its daemon with 255.

        If the job has no result yet, it fails, or restarts if it has been launched. An elastic job looks for the host.
        """
        needed = self._members.needs(host)
        self._members.remove(host)
        self.flow.remove(self._channels.pop(host))
        send_exit_code = self._daemons.pop(host, None)
        if send_exit_code:
            send_exit_code(255)
        if self.result is not None:
            return
        text = f"The host {host} was lost: {reason}. Its own log says why, if it still can."
        if self._members.current and needed:
            self._fail(Result(HOST_LOST, text), host=host)
        elif self._members.are_elastic and self._early is None:
            write_log(text)
            self._search_without_restart()
        else:
            self._fail_early(Result(HOST_LOST, text))

    def _search_without_restart(self) -> None:
        """Looks for a lost host that takes no part in the job so far."""
        if self._gathering.is_past_limit:
            self._members.expect_present()
        self._gathering.search()
        self._launch_if_ready()

    def _dismiss(self, host: str, result: Result) -> None:
        """Ends a worker that can't take part, and that the job does not need. The job goes on without it."""
        from shoal_toolkit.hosts.messages import JobResult

        write_log(f"going on without {host}: {result.message}")
        channel = self._channels[host]
        channel.send(JobResult(result.exit_code, result.message, {}))

    # The end

    def _on_worker_ended(self, host: str, message: CommandEnded) -> None:
        """Handles the end of a worker's own command, or of its daemon. mpirun gets the daemon's exit code.

        Notes the worker's facts, and why a success can't be written there.
        """
        self._ranks.add_facts(host, message.facts)
        if message.unrecorded:
            self._unrecorded = self._unrecorded or f"On {host}: {message.unrecorded}"
        send_exit_code = self._daemons.pop(host, None)
        if send_exit_code:
            if self._failed_rank is None:
                self._failed_rank = message.failed_rank
            send_exit_code(message.code)
            self._check_mpirun_end()
        elif host in self._pending:
            self._on_host_command_ended(host, message.code, message.stderr)

    def on_command_ended(self, code: int) -> None:
        """Handles the end of this host's command. After mpirun, the workers' daemons have 5 s to end."""
        if not self._launched:
            return
        if not self.plan.by_mpirun:
            self._on_host_command_ended(self.name, code, self._mpirun_log.text() if self._mpirun_log else "")
            return
        self._mpirun_code = code
        self._farewell = self.loop.call_later(_FAREWELL_SECONDS, self._give_up_daemons)
        self._check_mpirun_end()

    def _on_host_command_ended(self, host: str, code: int, stderr: str) -> None:
        """Handles the end of a host's own command: the script, or torchrun after its ranks.

        A failure of torchrun sets the result, unless the job is being stopped. After the last command the job ends.
        """
        plan = self.plan
        self._pending.discard(host)
        if not plan.launcher.has_ranks or host in plan.outside:
            rank = plan.rank_of(host)
            self.output.add_tail(rank, stderr)
            self._note_end(rank, code)
        elif code and not self.stopped_by and not self._growing_since:
            failure = Failure(code, f"{plan.launcher.name} on {host}", plan.command, stderr, launcher=True)
            self._fail(explain(failure), host=host)
        self._check_end()

    def on_rank_ended(self, rank: int, code: int) -> None:
        if self._launched:
            self._note_end(rank, code)

    def _note_end(self, rank: int, code: int) -> None:
        """Notes the end of a rank. mpirun ends the other ranks itself; without mpirun a failure ends the job here.

        A failure that restarts the job does so at once, also with mpirun. A rank that SIGTERM ended waits for mpirun's
        end: mpirun sends it after another rank failed. The report of that rank can take longer, from another host.

        A job that is being stopped ends when all ranks that have started have ended.
        """
        self._ranks.add_end(rank, code)
        if self.stopped_by:
            if self._ranks.all_ended:
                self.set_result(Result.from_signal(self.stopped_by))
        elif self._growing_since:
            if self._ranks.all_ended:
                self._finish_growth()
        elif code and (not self.plan.by_mpirun or rank >= self.plan.world_size):
            self._fail(self._explain_rank(rank, code), rank=rank)
        elif code not in (SUCCESS, 128 + signal.SIGTERM) and self._restarts is not None and self._final_rank is None:
            failure = self._explain_rank(rank, code)
            if self._restarts.explain_refusal(failure):
                self._final_rank = rank  # mpirun now ends the other ranks, which must not restart the job
            else:
                self._fail(failure, rank=rank)

    def _explain_rank(self, rank: int, code: int) -> Result:
        """Returns the result for a rank that failed; if it ran here, with facts about this host."""
        if self._ranks.host_of.get(rank) == self.name:
            self._ranks.add_facts(self.name, self.collect_facts())
        return self._ranks.explain_rank(rank, code)

    def on_sidecar_ended(self, name: str, code: int) -> None:
        """Fails or restarts the job, unless it is being stopped: a sidecar must not end before it."""
        if not self.stopped_by:
            self._fail(Result(code or FAILED, describe_sidecar_end(name, self.name, code)), host=self.name)

    def _check_end(self) -> None:
        """Sets the result once every host's own command has ended; mpirun's failure is handled before.

        During a restart it does nothing.

        It is a success, unless the job is being stopped, ranks have not started, or a worker can't record it. Before a
        success it may warn about an exception in a shell script.
        """
        if (
            not self._launched
            or self._growing_since
            or self._pending
            or self.result is not None
            or (self.plan.by_mpirun and not self._mpirun_over)
        ):
            return
        if self.stopped_by:
            self.set_result(Result.from_signal(self.stopped_by))
        elif not self._ranks.all_started:
            self.set_result(self._ranks.explain_missing())
        elif self._unrecorded:
            self.set_result(Result(FAILED, self._unrecorded))
        else:
            self._ranks.warn_about_hidden_failure()
            self.set_result(Result(SUCCESS))

    @property
    def _mpirun_over(self) -> bool:
        """Whether mpirun and all of its daemons have ended, so that their last output was read."""
        return self._mpirun_code is not None and not self._daemons

    def _give_up_daemons(self) -> None:
        """Logs which daemons have not ended, answers mpirun's requests for them with 255, and sets the result."""
        for host in list(self._daemons):
            write_log(f"mpirun has ended, but its daemon on {host} has not within {_FAREWELL_SECONDS:.0f} s")
            self._daemons.pop(host)(255)
        self._check_mpirun_end()

    def _check_mpirun_end(self) -> None:
        """Sets the result once mpirun and all of its daemons have ended; before that it does nothing.

        A failed rank counts even if mpirun returns 0.
        """
        code, log = self._mpirun_code, self._mpirun_log
        if code is None or log is None or self._daemons or self.result is not None or self._growing_since:
            return
        rank = next((rank for rank in (self._final_rank, log.failed_rank) if rank is not None), self._failed_rank)
        if (code or rank is not None) and not self.stopped_by:  # MPI_Abort(256) ends mpirun with 0
            if rank is not None and self._ranks.host_of.get(rank) == self.name:
                self._ranks.add_facts(self.name, self.collect_facts())
            where = {} if rank is None else {"rank": rank}
            self._fail(self._ranks.explain_mpirun(log, rank, code or FAILED), **where)
            return
        self._check_end()

    # Restarting

    def _fail(self, failure: Result, **where: str | int) -> None:
        """Restarts the job after a failure, or ends it.

        Args:
            failure: The result without a restart.
            where: `rank` or `host`, for the report.
        """
        restarts = self._restarts
        if restarts is None or self.result is not None or self._early is not None or self.stopped_by:
            self.set_result(failure)
        elif refusal := restarts.explain_refusal(failure):
            summary, separator, rest = failure.message.partition("\n\n")
            self.set_result(failure._replace(message=f"{summary}\n{refusal}{separator}{rest}"))
        else:
            self._restart(restarts.begin(failure, where))

    def _restart(self, variables: Mapping[str, str]) -> None:
        """Ends the processes of all hosts, and looks for lost hosts. When all hosts are ready, the job is launched.

        Nothing is set up again, except on a host that comes back.
        """
        assert self._restarts is not None and self.processes is not None
        self._members.begin(self._restarts.number)
        self._launched = False
        self._growing_since = 0.0
        self._forget_launch()
        for channel in self._channels.values():
            self._send_restart(channel)
        self._gathering.remove_limit()
        if self._members.missing:
            self._gathering.search()
        self.processes.prepare_restart({**variables, **self._change_port()}, self.task.settings.standby)
        self.processes.end(self._on_set_up)

    def _change_port(self) -> dict[str, str]:
        """Returns another MASTER_PORT for ranks of one host: now another user of the machine can take the last one."""
        if len(self.plan.hosts) > 1 or "MASTER_PORT" in self.task.environ:
            return {}
        from shoal_toolkit.system.ports import choose_port

        return dict.fromkeys(("MASTER_PORT", "SM_MASTER_PORT"), choose_port())

    def _send_restart(self, channel: Channel) -> None:
        """Sends the number of the current restart and its reason to a worker."""
        from shoal_toolkit.hosts.messages import Restart

        reason = self.report["restarts"][-1]["reason"] if self._members.number else ""
        channel.send(Restart(self._members.number, reason, self.task.settings.standby))

    # Growing

    def _grow_if_possible(self) -> None:
        """Ends the ranks gently if a host waits to take part, once all ranks have started, and before one has ended."""
        if (
            not self._members.newcomers
            or not self._launched
            or self._growing_since
            or self.result is not None
            or self._early is not None
            or self.stopped_by
            or self.processes is None
            or not self._ranks.all_started
            or self._ranks.any_ended
        ):
            return
        from shoal_toolkit.hosts.messages import PAUSE

        self._growing_since = monotonic()
        write_log(f"{', '.join(self._members.newcomers)} can take part: the ranks get SIGTERM, and start again")
        for host in self._members.current:
            if host in self._channels:
                self._channels[host].send(PAUSE)
        self.processes.stop(signal.SIGTERM)
        since = self._growing_since
        self.loop.call_later(self.task.settings.stop_grace, lambda: self._end_growth_grace(since))

    def _end_growth_grace(self, since: float) -> None:
        """Kills the ranks that have not ended, if the growth that began at `since` still waits for them."""
        if self._growing_since == since and self.result is None and not self.stopped_by:
            self._finish_growth()

    def _finish_growth(self) -> None:
        """Starts all ranks again, on all hosts that are ready. It is in the report, but not as a failure."""
        assert self._restarts is not None
        hosts, count = self._members.newcomers, len(self._members.current) + len(self._members.newcomers)
        if hosts:
            reason = f"host{'s' * (len(hosts) > 1)} {', '.join(hosts)} came back: {count} hosts"
        else:
            reason = f"a host came back and was lost again: {count} hosts"
        write_log(reason)
        self._restart(self._restarts.begin_growth(reason, self._growing_since))

    def _forget_launch(self) -> None:
        """Resets what belongs to the launch that has failed. Writes the last line of its mpirun."""
        self._write_mpirun_rest()
        self._mpirun_code = self._failed_rank = self._final_rank = None
        self._unrecorded = ""
        self._daemons.clear()
        if self._farewell is not None:
            self._farewell.cancel()
        if self._requests is not None:
            self._requests.close()
            self._requests = None

    # Stopping

    def _on_stopped_host(self, host: str, number: int) -> None:
        """Stops the job for a signal that a worker received. A second one from the same worker kills the ranks."""
        if self._members.current and not self._members.needs(host):
            self._dismiss(host, Result.from_signal(number))
            return
        if host in self._stopped_hosts:
            write_log(f"{host} received a second signal: killing the ranks now")
            self.kill()
            return
        self._stopped_hosts.add(host)
        write_log(f"{host} received a signal to stop")
        if self.note_stop(number):
            self.stop(number)

    def stop(self, number: int) -> None:
        """Passes a signal to the ranks of all hosts, and kills them after the grace period.

        If ranks have not started, mpirun or torchrun gets it too, so that no more start. Before the launch, or without
        a plan, the job ends at once.
        """
        if self.processes is None or not self._launched:
            self.set_result(Result.from_signal(number))
            return
        if self._channels:
            from shoal_toolkit.hosts.messages import PassSignal

            for channel in self._channels.values():
                channel.send(PassSignal(number))
        self.processes.stop(number)
        if self.plan.has_ranks and not self._ranks.all_started:
            self.processes.signal_launcher(number)  # so that no more ranks start
        self.loop.call_later(self.task.settings.stop_grace, self.kill)

    def kill(self) -> None:
        """Ends the job with the result of a signal, which kills the ranks."""
        if self.result is None:
            self.set_result(Result.from_signal(self.stopped_by))

    def set_result(self, result: Result) -> None:
        """Ends the job with a result, and kills what still runs here. Only the first result counts.

        Before, notes `training_seconds`, and writes the last line of mpirun.
        """
        if self.result is None:
            if self._first_start:
                self.report["training_seconds"] = round(monotonic() - self._first_start, 3)
            self._write_mpirun_rest()
        super().set_result(result)

    def _write_mpirun_rest(self) -> None:
        """Writes the last line of mpirun, if it is incomplete."""
        if self._mpirun_log is not None:
            for stream in (STDOUT, STDERR):
                self.output.write_launcher(stream, self.name, self._mpirun_log.flush(stream))

    def send_result(self, result: Result) -> None:
        """Sends every worker the result, and waits at most 5 s until they have confirmed it.

        Ends the search for workers.

        They confirm it by closing the connection, so that they end after the launcher. Hosts that did not are logged.
        """
        self._gathering.close()
        if not self._channels:
            return
        from shoal_toolkit.hosts.messages import JobResult

        shared = {key: value for key, value in self.report.items() if key not in ("current_host", "began")}
        for channel in self._channels.values():
            channel.send(JobResult(result.exit_code, result.message, shared))
        self._run_until(lambda: not self._channels, _FAREWELL_SECONDS)
        for host in self._channels:
            write_log(f"{host} has not confirmed the result within {_FAREWELL_SECONDS:.0f} s")

    def close(self) -> None:
        """Closes the search for workers, the socket of requests, and the connections to workers."""
        self._gathering.close()
        if self._preflight is not None:
            self._preflight.close()
        if self._requests is not None:
            self._requests.close()
        for channel in self._channels.values():
            channel.close()
