"""Every host but the first: lets the first host in, runs what it asks for, and ends with its verdict."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

from shoal_toolkit import verdict, wire
from shoal_toolkit.agent import Agent
from shoal_toolkit.daemonlog import DaemonLog
from shoal_toolkit.daemons import daemon_command
from shoal_toolkit.errors import LaunchError, TrainError
from shoal_toolkit.host import Host, Task
from shoal_toolkit.log import say
from shoal_toolkit.machine import find_program
from shoal_toolkit.plan import LaunchPlan
from shoal_toolkit.ranks import STDERR
from shoal_toolkit.streams import Tail
from shoal_toolkit.verdict import Verdict

if TYPE_CHECKING:
    from shoal_toolkit.wire import Channel


class Worker(Host):
    """Follows the first host."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self._agent: Agent | None = None
        self._channel: Channel | None = None
        self._tail = Tail()
        self._daemon = DaemonLog()
        self._first_host = task.cluster.first_host
        self._uses_mpi = isinstance(task.plan, LaunchPlan) and task.plan.uses_mpi

    def begin(self) -> None:
        task = self.task
        if isinstance(task.plan, TrainError):
            say(f"{task.plan}\nTelling the first host {self._first_host}.")
        hosts, current = task.cluster.hosts, task.cluster.current_host
        self._agent = Agent(self.loop, task.settings.port, task.settings.secret, hosts, current, self._first_host_came)
        self.loop.call_later(task.settings.hosts_timeout, self._too_late)

    def _too_late(self) -> None:
        if self._channel is None:
            plan, seconds = self.task.plan, self.task.settings.hosts_timeout
            late = LaunchError(
                f"The first host {self._first_host} has not connected within {seconds} s. Every host of "
                "resourceconfig.json must run `train`; check its log. SHOAL_HOSTS_TIMEOUT sets the limit."
            )
            self.decide(verdict.of_error(plan if isinstance(plan, TrainError) else late))

    def _first_host_came(self, channel: Channel) -> None:
        self._channel = channel
        channel.on_frame = self._frame
        channel.on_lost = self._lost
        channel.on_held = lambda held: self.flow.report(channel, held)
        if isinstance(self.task.plan, TrainError):
            self._failed(self.task.plan)

    def _lost(self, reason: str) -> None:
        self.decide(
            Verdict(1, f"The first host {self._first_host} was lost: {reason}. Its own log says why, if it still can.")
        )

    # What the first host says

    def _frame(self, kind: bytes, payload: bytes) -> None:
        if kind == wire.GO:
            self._attempt(None)
            return
        said = wire.fields(payload)
        if kind == wire.START:
            self._attempt(str(said["command"]))
        elif kind == wire.SIGNAL:
            self._pass_on(int(said["number"]))
        elif kind == wire.VERDICT:
            self._decided(said)
        else:
            raise wire.ProtocolError(f"the kind {kind!r}")

    def _attempt(self, command: str | None) -> None:
        """Start what is asked for: the script, or with a command mpirun's daemon."""
        if self.work is None:
            return  # this host cannot, and has said so: the first host had not heard it yet
        try:
            if command is None:
                self.work.start_script()
            else:
                argv, variables = daemon_command(command, find_program("orted", self.task.environ))
                self.work.prepare()
                self.work.start_launcher(argv, variables)
        except TrainError as error:
            self._failed(error)

    def _failed(self, error: TrainError) -> None:
        self._send(wire.FAILED, code=error.exit_code, message=str(error))

    def _pass_on(self, number: int) -> None:
        self.stopped_by = self.stopped_by or number
        if self.work is not None:
            self.work.signal(number)

    def _decided(self, said: dict[str, Any]) -> None:
        self.report.update(said["report"])
        self.decide(Verdict(int(said["code"]), str(said["message"])))

    # What this host's work says

    def rank_started(self, rank: int) -> None:
        self._send(wire.STARTED, rank=rank)

    def rank_output(self, stream: int, rank: int, data: bytes) -> None:
        """Output of MPI ranks goes to the first host; that of a plain process stays here, as on SageMaker."""
        if self._uses_mpi:
            if self._channel is not None:
                self._channel.send_output(stream, rank, data)
            return
        self._tail.add(data)
        self.sinks[stream].write(data)

    def launcher_said(self, stream: int, data: bytes) -> None:
        self.sinks[STDERR].write(self._daemon.feed(stream, data))

    def work_ended(self, code: int) -> None:
        self._send(wire.ENDED, code=code, stderr=self._tail.text(), failed_rank=self._daemon.failed_rank)

    def _send(self, kind: bytes, **fields: Any) -> None:
        if self._channel is not None:
            self._channel.send_json(kind, **fields)

    # Stopping

    def stop(self, number: int) -> None:
        """The first host decides for all; without one there is nothing to stop."""
        if self._channel is None:
            self.decide(verdict.of_stop(number))
        else:
            self._send(wire.STOPPING, signal=number)

    def stop_again(self) -> None:
        self._send(wire.STOPPING, signal=self.stopped_by or signal.SIGTERM)

    def tell(self, decided: Verdict) -> None:
        """Closing the connection says that the verdict has been written here."""
        if self._channel is not None:
            self._channel.close()

    def close(self) -> None:
        if self._agent is not None:
            self._agent.close()
        if self._channel is not None:
            self._channel.close()
