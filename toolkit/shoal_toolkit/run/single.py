"""The only host of a job that runs one script, once. Set-up, ranks, sidecars and restarts are in first.py."""

from __future__ import annotations

from shoal_toolkit.errors import SUCCESS, TrainError
from shoal_toolkit.result.result import Result
from shoal_toolkit.run.host import Host
from shoal_toolkit.run.script import HostScript


class SingleHost(Host):
    """Runs the script, and ends with its exit code."""

    def make_processes(self) -> HostScript:
        return HostScript(self.loop, self.flow, self.plan, self.task.environ, self, self.output.reads_all)

    def begin(self) -> None:
        assert self.processes is not None
        try:
            self.processes.start()
        except TrainError as error:
            self.set_result(Result.from_error(error))

    def on_rank_started(self, rank: int) -> None:
        self.note_start()

    def on_rank_output(self, stream: int, rank: int, data: bytes) -> None:
        self.write_rank_output(stream, rank, self.name, data)

    def fail_rank(self, rank: int, result: Result) -> None:
        self.set_result(result)

    def on_command_ended(self, code: int) -> None:
        if self.stopped_by:
            self.set_result(Result.from_signal(self.stopped_by))
        elif code or self.plan.script[0].endswith("sh"):
            self.set_result(self._explain(code))
        else:
            self.set_result(Result(SUCCESS))

    def _explain(self, code: int) -> Result:
        """Returns the result of a script that failed, or of a shell script, in which a command may have failed."""
        from shoal_toolkit.run.rank_table import RankTable  # not needed by a job that succeeds

        ranks = RankTable(self.plan, self.output, self.task.paths)
        if not code:
            ranks.warn_about_hidden_failure()
            return Result(SUCCESS)
        ranks.host_of[0] = self.name
        ranks.set_facts(self.name, self.collect_facts())
        return ranks.explain_rank(0, code)

    def stop(self, number: int) -> None:
        """Passes a signal to the script, and kills it after the grace period."""
        if self.processes is None or not self.processes.running:
            self.set_result(Result.from_signal(number))
            return
        self.processes.stop(number)
        self.loop.call_later(self.task.settings.stop_grace, self.kill)

    def kill(self) -> None:
        """Ends the job with the result of a signal, which kills the script."""
        self.set_result(Result.from_signal(self.stopped_by))

    def set_result(self, result: Result) -> None:
        """Ends the job with a result, and kills what still runs here. Only the first result counts."""
        if self.result is None:
            self.note_end()
        super().set_result(result)

    def drain_sidecars(self) -> None:
        """Does nothing: there are none."""

    def send_result(self, result: Result) -> None:
        """Sends nothing: there are no other hosts."""

    def close(self) -> None:
        """Closes nothing: there are no connections."""
