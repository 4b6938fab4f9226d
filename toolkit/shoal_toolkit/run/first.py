"""The first host: launches, watches, and decides for all. A job of one host has this role too, unless it is plain.

It launches once this host is set up; first_of_several.py waits for all hosts. The result: mpirun ends with the exit
code of the rank that failed first. Without mpirun, the first rank that fails decides.

A restart (SHOAL_MAX_RESTARTS) goes back to the time before the launch.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from enum import Enum

from shoal_toolkit.errors import FAILED, SUCCESS, LaunchError, TrainError
from shoal_toolkit.fast_typing import TYPE_CHECKING
from shoal_toolkit.log import STDERR, STDOUT
from shoal_toolkit.output.mpirun_log import MpirunLog
from shoal_toolkit.result.result import Failure, Result
from shoal_toolkit.run.host import HostTask
from shoal_toolkit.run.launching import LaunchingHost, describe_sidecar_end
from shoal_toolkit.run.mpirun import Mpirun
from shoal_toolkit.run.rank_table import RankTable, explain

if TYPE_CHECKING:  # imported when needed: sockets and hashes take too long for a job of one host
    from shoal_toolkit.hosts.wire import Channel
    from shoal_toolkit.run.restarts import Restarts


class Phase(Enum):
    """Where a job is. A restart goes from a phase that has launched back to PREPARING."""

    PREPARING = "hosts connect, and get ready for the next launch"
    FAILING = "hosts that are missing get a failure before the launch when they come"
    RUNNING = "ranks start, run or end"
    GROWING = "ranks end so that more hosts can take part in the next launch"
    STOPPING = "ranks end because of a signal"
    CANCELLED = "the result came before a launch"
    ENDED = "the result came after a launch: processes that still run are killed"

    @property
    def has_launched(self) -> bool:
        return self in (Phase.RUNNING, Phase.GROWING, Phase.STOPPING, Phase.ENDED)

    @property
    def has_result(self) -> bool:
        return self in (Phase.CANCELLED, Phase.ENDED)


class FirstHost(LaunchingHost):
    """Leads the job."""

    _ranks: RankTable  # from the launch on

    def __init__(self, task: HostTask) -> None:
        super().__init__(task)
        self._phase = Phase.PREPARING
        self._channels: dict[str, Channel] = {}  # to the other hosts
        self._log_of_launcher: MpirunLog | None = None  # of mpirun or torchrun
        self._mpirun: Mpirun | None = None
        self._final_rank: int | None = None  # the first that failed, if that does not restart the job
        self._pending: set[str] = set()  # hosts with a command of their own that has not ended
        self._unrecorded = ""  # why a worker can't write a success
        self._restarts: Restarts | None = None
        if task.may_restart:
            from shoal_toolkit.run.restarts import Restarts

            self._restarts = Restarts(task.settings, task.paths, self.report)

    # Setting up

    def begin(self) -> None:
        """Starts to set up this host. An error in the plan fails the job."""
        if isinstance(self.task.plan, TrainError):
            self._fail_early(Result.from_error(self.task.plan))
        elif self.processes is not None:
            self.processes.set_up(self.task.settings.setup_timeout, self._on_set_up)

    def _on_set_up(self, error: LaunchError | None) -> None:
        if error is not None:
            self._fail_early(Result.from_error(error))
        else:
            self._on_ready(self.name)

    def _on_ready(self, host: str) -> None:
        """Launches the job now that a host, here this one, can launch."""
        self._launch_if_ready()

    def _launch_if_ready(self) -> None:
        if self._phase is Phase.PREPARING:
            try:
                self._launch()
            except TrainError as error:
                self.set_result(Result.from_error(error))

    def _fail_early(self, result: Result) -> None:
        self.set_result(result)

    # Launching

    def _launch(self) -> None:
        """Starts the script or launcher, and serves mpirun's requests for daemons. Raises TrainError if that fails."""
        plan, processes = self.plan, self.processes
        assert processes is not None
        self.forget_earlier_start()
        self._phase, self._ranks = Phase.RUNNING, RankTable(plan, self.output, self.task.paths)
        self._pending = {host for host in plan.hosts if plan.runs_own_command(host)}
        if plan.has_ranks:
            self._log_of_launcher = MpirunLog()
        if not plan.by_mpirun:
            processes.start()
            return
        processes.prepare_ranks()
        from shoal_toolkit.plan.mpi import set_session_directory

        self._mpirun = Mpirun(self.loop, self._channels, self._check_end)
        if len(plan.ranks) > 1:
            self._mpirun.listen(processes.directory, plan.ranks.keys() - {self.name})
        processes.start_launcher(plan.command, set_session_directory(processes.directory))
        self._mpirun.on_started(processes.pid)

    # While it runs

    def on_rank_started(self, rank: int) -> None:
        if self._phase.has_launched:
            self._note_start(self.name, rank)

    def _note_start(self, host: str, rank: int) -> None:
        """Answers mpirun's request for a daemon with 0."""
        self._ranks.host_of[rank] = host
        if self._mpirun is not None:
            self._mpirun.note_start(host)
        self.note_start()
        if self._restarts is not None and self._ranks.all_started:
            self._restarts.finish()

    def on_rank_output(self, stream: int, rank: int, data: bytes) -> None:
        self.write_rank_output(stream, rank, self._ranks.host_of.get(rank, "?"), data)

    def fail_rank(self, rank: int, result: Result) -> None:
        if self._phase is Phase.RUNNING:
            self._fail(result, rank=rank)

    def on_launcher_output(self, stream: int, data: bytes) -> None:
        """Writes output of the launcher without mpirun's noise. The lines left out say which rank failed.

        The notices of a mpirun that is killed for a restart are dropped.
        """
        log = self._log_of_launcher
        if log is not None and not self._phase.has_launched:
            return
        kept = log.feed(stream, data) if log is not None else data
        self.output.write_launcher(stream, self.name, kept)

    # The end

    def on_command_ended(self, code: int) -> None:
        """Handles the end of this host's command."""
        if self._mpirun is not None:
            self._mpirun.end(code)
        elif self._phase.has_launched:
            self._on_host_command_ended(self.name, code, self._log_of_launcher.text() if self._log_of_launcher else "")

    def _on_host_command_ended(self, host: str, code: int, stderr: str) -> None:
        """Handles the end of a host's own command: the script, or torchrun after its ranks."""
        plan = self.plan
        self._pending.discard(host)
        if not plan.launcher.has_ranks or host in plan.outside:
            rank = plan.rank_of(host)
            self.output.add_tail(rank, stderr)
            self._note_end(rank, code)
        elif code and self._phase is Phase.RUNNING:
            failure = Failure(code, f"{plan.launcher.name} on {host}", plan.command, stderr, launcher=True)
            self._fail(explain(failure), host=host)
        self._check_end()

    def on_rank_ended(self, rank: int, code: int) -> None:
        if self._phase.has_launched:
            self._note_end(rank, code)

    def _note_end(self, rank: int, code: int) -> None:
        """Notes the end of a rank. mpirun ends the other ranks itself; without mpirun a failure ends the job here."""
        self._ranks.add_end(rank, code)
        if self._phase is Phase.STOPPING:
            if self._ranks.all_ended:
                self.set_result(Result.from_signal(self.stopped_by))
        elif self._phase is not Phase.RUNNING:
            return
        elif code and (not self.plan.by_mpirun or rank >= self.plan.world_size):
            self._fail(self._explain_rank(rank, code), rank=rank)
        # mpirun sends SIGTERM after another rank failed. The report of that rank can take longer.
        elif code not in (SUCCESS, 128 + signal.SIGTERM) and self._restarts is not None and self._final_rank is None:
            failure = self._explain_rank(rank, code)
            if self._restarts.explain_refusal(failure):
                self._final_rank = rank  # mpirun now ends the other ranks, which must not restart the job
            else:
                self._fail(failure, rank=rank)

    def _explain_rank(self, rank: int, code: int) -> Result:
        if self._ranks.host_of.get(rank) == self.name:
            self._ranks.set_facts(self.name, self.collect_facts())
        return self._ranks.explain_rank(rank, code)

    def on_sidecar_ended(self, name: str, code: int) -> None:
        """Fails or restarts the job, unless it is being stopped: a sidecar must not end before it."""
        if self._phase is not Phase.STOPPING:
            self._fail(Result(code or FAILED, describe_sidecar_end(name, self.name, code)), host=self.name)

    def _check_end(self) -> None:
        """Sets the result once every host's own command has ended, and mpirun with all daemons."""
        mpirun = self._mpirun
        if self._phase not in (Phase.RUNNING, Phase.STOPPING) or (mpirun is not None and not mpirun.is_over):
            return
        if mpirun is not None and self._phase is Phase.RUNNING and self._fail_by_mpirun(mpirun):
            return
        if self._pending:
            return
        if self._phase is Phase.STOPPING:
            self.set_result(Result.from_signal(self.stopped_by))
        elif not self._ranks.all_started:
            self.set_result(self._ranks.explain_missing())
        elif self._unrecorded:
            self.set_result(Result(FAILED, self._unrecorded))
        else:
            self._ranks.warn_about_hidden_failure()
            self.set_result(Result(SUCCESS))

    def _fail_by_mpirun(self, mpirun: Mpirun) -> bool:
        """Fails or restarts the job if mpirun failed, and returns whether it did. A failed rank counts after 0 too."""
        log, code = self._log_of_launcher, mpirun.code
        assert log is not None
        failed = (self._final_rank, log.failed_rank, mpirun.failed_rank)
        rank = next((rank for rank in failed if rank is not None), None)
        if not code and rank is None:  # MPI_Abort(256) ends mpirun with 0
            return False
        if rank is not None and self._ranks.host_of.get(rank) == self.name:
            self._ranks.set_facts(self.name, self.collect_facts())
        where = {} if rank is None else {"rank": rank}
        self._fail(self._ranks.explain_mpirun(log, rank, code or FAILED), **where)
        return True

    # Restarting

    def _fail(self, failure: Result, **where: str | int) -> None:
        """Restarts the job, or ends it. `where` has `rank` or `host`, for the report."""
        restarts = self._restarts
        if restarts is None or self._phase not in (Phase.PREPARING, Phase.RUNNING, Phase.GROWING):
            self.set_result(failure)
        elif refusal := restarts.explain_refusal(failure):
            summary, separator, rest = failure.message.partition("\n\n")
            self.set_result(failure._replace(message=f"{summary}\n{refusal}{separator}{rest}"))
        else:
            self._restart(restarts.begin(failure, where))

    def _restart(self, variables: Mapping[str, str]) -> None:
        """Ends the processes of this host, and launches the job when they have ended. Nothing is set up again."""
        assert self._restarts is not None and self.processes is not None
        self._forget_launch()
        self._phase = Phase.PREPARING
        self.processes.prepare_restart({**variables, **self._change_port()})
        self.processes.end(self._on_set_up)

    def _change_port(self) -> dict[str, str]:
        """Returns another MASTER_PORT for ranks of one host: now another user of the machine can take the last one."""
        if len(self.plan.hosts) > 1 or "MASTER_PORT" in self.task.environ:
            return {}
        from shoal_toolkit.system.ports import choose_port

        return dict.fromkeys(("MASTER_PORT", "SM_MASTER_PORT"), choose_port())

    def _forget_launch(self) -> None:
        """Resets what belongs to the launch that has failed. Writes the last line of its mpirun."""
        self._write_launcher_rest()
        self._final_rank, self._unrecorded = None, ""
        if self._mpirun is not None:
            self._mpirun.close()
            self._mpirun = None

    # Stopping

    def stop(self, number: int) -> None:
        """Passes a signal to the ranks, and kills them after the grace period.

        If ranks have not started, mpirun or torchrun gets it too, so that no more start. Before the launch, or without
        a plan, the job ends at once.
        """
        if self.processes is None or not self._phase.has_launched:
            self.set_result(Result.from_signal(number))
            return
        if not self._phase.has_result:
            self._phase = Phase.STOPPING
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
        if not self._phase.has_result:
            self.note_end()
            self._write_launcher_rest()
            self._phase = Phase.ENDED if self._phase.has_launched else Phase.CANCELLED
        super().set_result(result)

    def _write_launcher_rest(self) -> None:
        if self._log_of_launcher is not None:
            for stream in (STDOUT, STDERR):
                self.output.write_launcher(stream, self.name, self._log_of_launcher.flush(stream))

    def send_result(self, result: Result) -> None:
        """Sends nothing: there are no other hosts."""

    def close(self) -> None:
        """Closes the socket of mpirun's requests."""
        if self._mpirun is not None:
            self._mpirun.close()
