"""The first host of several: connects to the others, launches when all are ready, and decides for all.

It launches once every host is ready: connected, and set up. If every host starts its own command, the first rank or
host that fails decides. The other hosts get the result then, and the first host ends after they have confirmed it.

At a restart (SHOAL_MAX_RESTARTS) every host ends its processes, and reports that it is ready again; lost hosts are
looked for. Before that report, messages of a host are about the earlier start.

An elastic job (SHOAL_MIN_HOSTS) restarts with the hosts left. When another host is ready, the ranks get time to save
their state, and all hosts start again.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from functools import partial
from time import monotonic

from shoal_toolkit.errors import FAILED, HOST_LOST, SUCCESS
from shoal_toolkit.fast_typing import Any
from shoal_toolkit.hosts import messages
from shoal_toolkit.hosts.wire import Channel
from shoal_toolkit.log import write_log
from shoal_toolkit.preflight.check import Preflight
from shoal_toolkit.result.result import Result
from shoal_toolkit.run.first import FirstHost, Phase
from shoal_toolkit.run.host import HostTask
from shoal_toolkit.run.members import Gathering

_CONFIRM_SECONDS = 5.0  # for the workers, to confirm the result
_DELIVERY_SECONDS = 30  # for hosts that start later than a failure before the launch


class FirstOfSeveral(FirstHost):
    """Leads a job of several hosts."""

    def __init__(self, task: HostTask) -> None:
        super().__init__(task)
        self._gathering = Gathering(self.loop, task, self._on_found, self._on_search_limit)
        self._members = self._gathering.members
        self._early = Result(SUCCESS)  # the failure while FAILING
        self._stopped_hosts: set[str] = set()
        self._preflight: Preflight | None = None
        self._growing_since = 0.0  # time.monotonic(), while GROWING

    # Connecting and setting up

    def begin(self) -> None:
        """Starts to connect to the workers and to set up this host. An error in the plan is reported to them.

        If a worker isn't found in time, the job fails. With a plan, it starts the preflight, which
        opens MASTER_PORT.
        """
        task = self.task
        self._gathering.search()
        if self.has_plan:
            self._preflight = Preflight(task.paths, self.plan, one_kind=len(task.cluster.instance_groups) < 2)
            self.loop.call_later(0, self._preflight.collect)
        super().begin()

    def _on_search_limit(self, reason: str) -> None:
        """Begins an elastic job with the hosts that have come, if they are enough. Otherwise the job fails."""
        failing = self._phase is Phase.FAILING
        if not failing and self._members.expect_present():
            count = len(self._channels) + 1
            write_log(f"beginning with {count} of {len(self.task.hosts)} hosts (SHOAL_MIN_HOSTS). {reason}")
            self._launch_if_ready()
            return
        code = HOST_LOST if self._members.number else FAILED  # a host did not come back
        self.set_result(self._early if failing else Result(code, reason))

    def _on_ready(self, host: str) -> None:
        """Notes that a host can launch, or that the job can grow by it. Raises ValueError if it was ready before."""
        self._members.note_ready(host)
        if self._phase.has_launched:
            self._grow_if_possible()
        else:
            self._launch_if_ready()

    def _launch_if_ready(self) -> None:
        """Starts the job once all hosts that take part are ready, so that no script runs if a host fails before."""
        if self._members.are_ready:
            super()._launch_if_ready()

    def _fail_early(self, result: Result) -> None:
        """Missing hosts have 30 s to connect, so that no host waits out its timeout."""
        if not self._gathering.is_searching or self._members.current:
            self.set_result(result)
        elif self._phase is Phase.PREPARING:
            self._phase, self._early = Phase.FAILING, result
            self._gathering.announce_limit(_DELIVERY_SECONDS)
            write_log(
                f"{result.message}\nWaiting for the other hosts, to report this to them, at most {_DELIVERY_SECONDS} s."
            )
            self.loop.call_later(_DELIVERY_SECONDS, lambda: self.set_result(result))

    def _on_found(self, host: str, channel: Channel) -> None:
        """Takes over a worker's connection. The last one sends an earlier failure to all."""
        channel.on_message = partial(self._on_message, host)
        channel.on_lost = partial(self._on_lost, host)
        self._channels[host] = channel
        self.flow.add(channel)
        if self._members.current:
            write_log(f"{host} has come back")
            self._send_restart(channel)  # it has to know the number of the last restart
        if self._phase is Phase.FAILING and not self._gathering.is_searching:
            self.set_result(self._early)

    # Launching

    def _launch(self) -> None:
        """Launches the job on all hosts. Before the first launch, logs findings and closes MASTER_PORT."""
        self._plan_start(self._members.start())
        if self._preflight is not None:
            self._preflight.log_findings()
            self._preflight = None
        super()._launch()
        for host in self._pending & self._channels.keys():
            self._channels[host].send(messages.GO)

    def _plan_start(self, hosts: Sequence[str]) -> None:
        """Plans the start of an elastic job, here and on the other hosts. Raises TrainError if that fails here."""
        if not self._members.are_elastic:
            return
        self.replan_with(hosts)
        for host, channel in self._channels.items():
            if host in hosts:
                channel.send(messages.NextHosts(hosts))

    # While it runs

    def _note_start(self, host: str, rank: int) -> None:
        super()._note_start(host, rank)
        self._grow_if_possible()

    def _note_end(self, rank: int, code: int) -> None:
        super()._note_end(rank, code)
        if self._phase is Phase.GROWING and self._ranks.all_ended:
            self._finish_growth()

    def _on_message(self, host: str, message: Any) -> None:
        """Drops messages about an earlier start, except output. Raises ProtocolError at a wrong time."""
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

    def _on_state(self, host: str, message: messages.HostFailed | messages.Ready) -> None:
        """Notes a worker that is ready. Fails or restarts the job if it can't take part."""
        if isinstance(message, messages.Ready):
            try:
                self._on_ready(host)
            except ValueError as error:
                raise messages.ProtocolError(str(error)) from None
            return
        result = Result(message.code or FAILED, f"On {host}: {message.message}")
        if self._members.current and not self._members.needs(host):
            self._dismiss(host, result)
        elif self._phase.has_launched and message.restartable:
            self._fail(result, host=host)
        else:
            self._fail_early(result)

    def _on_rank_message(self, host: str, message: Any) -> None:
        if isinstance(message, messages.RankOutput):
            self.on_rank_output(message.stream, message.rank, message.data)
        elif not self._phase.has_launched:
            return  # about an earlier start
        elif isinstance(message, messages.RankStarted):
            self._note_start(host, message.rank)
        elif isinstance(message, messages.RankEnded):
            self._ranks.set_facts(host, message.facts)
            self._note_end(message.rank, message.code)
        elif isinstance(message, messages.CommandEnded):
            self._on_worker_ended(host, message)
        else:
            raise messages.ProtocolError(f"{type(message).__name__}, which a worker does not send")

    def _on_lost(self, host: str, reason: str) -> None:
        """Fails or restarts the job. An elastic job looks for the host. mpirun's request is answered with 255."""
        needed = self._members.needs(host)
        self._members.remove(host)
        self.flow.remove(self._channels.pop(host))
        if self._mpirun is not None:
            self._mpirun.end_daemon(host, 255)
        if self._phase.has_result:
            return
        text = f"The host {host} was lost: {reason}. Its own log says why, if it still can."
        if self._members.current and needed:
            self._fail(Result(HOST_LOST, text), host=host)
        elif self._members.are_elastic and self._phase is not Phase.FAILING:
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
        write_log(f"going on without {host}: {result.message}")
        channel = self._channels[host]
        channel.send(messages.JobEnded(result.exit_code, result.message, {}))

    def _on_worker_ended(self, host: str, message: messages.CommandEnded) -> None:
        """Handles the end of a worker's command or daemon. mpirun gets the daemon's exit code."""
        self._ranks.set_facts(host, message.facts)
        if message.unrecorded:
            self._unrecorded = self._unrecorded or f"On {host}: {message.unrecorded}"
        if self._mpirun is not None and self._mpirun.end_daemon(host, message.code, message.failed_rank):
            self._check_end()
        elif host in self._pending:
            self._on_host_command_ended(host, message.code, message.stderr)

    # Restarting

    def _restart(self, variables: Mapping[str, str]) -> None:
        """Ends the processes of all hosts, and looks for lost ones. Only a host that comes back is set up."""
        assert self._restarts is not None
        self._members.begin(self._restarts.number)
        for channel in self._channels.values():
            self._send_restart(channel)
        self._gathering.remove_limit()
        if self._members.missing:
            self._gathering.search()
        super()._restart(variables)

    def _send_restart(self, channel: Channel) -> None:
        reason = self.report["restarts"][-1]["reason"] if self._members.number else ""
        channel.send(messages.PrepareRestart(self._members.number, reason))

    # Growing

    def _grow_if_possible(self) -> None:
        """Ends the ranks gently if a host waits to take part, once all ranks have started, and before one has ended."""
        if (
            self._phase is not Phase.RUNNING
            or not self._members.newcomers
            or self.processes is None
            or not self._ranks.all_started
            or self._ranks.any_ended
        ):
            return
        self._phase, self._growing_since = Phase.GROWING, monotonic()
        write_log(f"{', '.join(self._members.newcomers)} can take part: the ranks get SIGTERM, and start again")
        for host in self._members.current:
            if host in self._channels:
                self._channels[host].send(messages.PAUSE)
        self.processes.stop(signal.SIGTERM)
        since = self._growing_since
        self.loop.call_later(self.task.settings.stop_grace, lambda: self._end_growth_grace(since))

    def _end_growth_grace(self, since: float) -> None:
        """Kills the ranks that have not ended, if the growth that began at `since` still waits for them."""
        if self._phase is Phase.GROWING and self._growing_since == since:
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
        """Passes a signal to the ranks of all hosts, and kills them after the grace period."""
        if self._phase.has_launched:
            for channel in self._channels.values():
                channel.send(messages.PassSignal(number))
        super().stop(number)

    def send_result(self, result: Result) -> None:
        """Sends every worker the result, and waits at most 5 s until they have confirmed it.

        Ends the search for workers.

        They confirm it by closing the connection, so that they end after the launcher. Hosts that did not are logged.
        """
        self._gathering.close()
        shared = {key: value for key, value in self.report.items() if key not in ("current_host", "began")}
        for channel in self._channels.values():
            channel.send(messages.JobEnded(result.exit_code, result.message, shared))
        self.run_until(lambda: not self._channels, _CONFIRM_SECONDS)
        for host in self._channels:
            write_log(f"{host} has not confirmed the result within {_CONFIRM_SECONDS:.0f} s")

    def close(self) -> None:
        """Closes the search for workers, the socket of mpirun's requests, and the connections to workers."""
        self._gathering.close()
        if self._preflight is not None:
            self._preflight.close()
        super().close()
        for channel in self._channels.values():
            channel.close()
