"""Keeps which ranks of the job have started and ended, and explains the failure of one."""

from __future__ import annotations

from collections.abc import Mapping

from shoal_toolkit.errors import FAILED
from shoal_toolkit.fast_typing import TYPE_CHECKING
from shoal_toolkit.job.contract import Paths
from shoal_toolkit.log import write_log
from shoal_toolkit.output.output import Output
from shoal_toolkit.plan.plan import LaunchPlan
from shoal_toolkit.result.result import Failure, Result, read_script_failure

if TYPE_CHECKING:  # a plain process needs none
    from shoal_toolkit.output.mpirun_log import MpirunLog


class RankTable:
    """All ranks of a job, on the first host."""

    def __init__(self, plan: LaunchPlan, output: Output, paths: Paths) -> None:
        self.host_of: dict[int, str] = {}  # ranks that have started
        self._codes: dict[int, int] = {}  # ranks that have ended → exit code
        self._facts: dict[str, Mapping[str, int]] = {}  # by host
        self._plan = plan
        self._output = output
        self._paths = paths

    def add_end(self, rank: int, code: int) -> None:
        """Keeps the exit code of a rank that has ended."""
        self._codes[rank] = code

    def set_facts(self, host: str, facts: Mapping[str, int]) -> None:
        """Replaces all facts about a host that may explain a failure; an empty mapping changes nothing."""
        self._facts[host] = facts or self._facts.get(host, {})

    @property
    def all_started(self) -> bool:
        """Whether every rank has started. torchrun starts as many as a host has GPUs: one per host is enough then."""
        if self._plan.by_mpirun:
            return all(rank in self.host_of for rank in range(self._plan.world_size))
        return set(self._plan.ranks) <= set(self.host_of.values())

    @property
    def all_ended(self) -> bool:
        """Whether every rank that has started has ended."""
        return self.host_of.keys() <= self._codes.keys()

    @property
    def any_ended(self) -> bool:
        """Whether a rank has ended."""
        return bool(self._codes)

    def explain_missing(self) -> Result:
        """Returns the result of a launcher that ended successfully before all ranks had started."""
        program = "mpirun" if self._plan.by_mpirun else self._plan.launcher.name
        started = f"{len(self.host_of)} of {self._plan.world_size} ranks"
        return Result(FAILED, f"{program} ended with exit code 0, but only {started} had started.")

    def explain_rank(self, rank: int, code: int) -> Result:
        """Returns the result of a job in which a rank failed.

        If the script on this host wrote a failure file, its text is the reason instead of stderr.
        """
        host = self.host_of.get(rank, "")
        own = read_script_failure(self._paths) if host == self._plan.current_host else ""
        stderr, reason = own or self._output.stderr_tail(rank), own.partition("\n")[0]
        facts = self._facts.get(host, {})
        return explain(Failure(code, self._describe(rank), self._plan.script, stderr, facts, reason=reason))

    def explain_mpirun(self, log: MpirunLog, rank: int | None, code: int) -> Result:
        """Returns the result of a job that mpirun ended. `rank` failed first; None if that is unknown.

        The cause is from the rank's stderr, from the notice of its MPI, or from mpirun's output.
        """
        if rank is None:
            reason = log.failure_reason()
            return explain(Failure(code, "mpirun", self._plan.command, log.text(), launcher=True, reason=reason))
        cause = "" if self._output.stderr_tail(rank).strip() else log.rank_failure_cause()
        if not cause:
            return self.explain_rank(rank, code)
        # The rank wrote nothing itself, but its MPI wrote a notice through mpirun.
        from shoal_toolkit.output.mpirun_log import find_failure_reason

        reason = find_failure_reason(cause)
        return explain(Failure(code, self._describe(rank), self._plan.script, cause, reason=reason))

    def warn_about_hidden_failure(self) -> None:
        """Logs a warning if a shell script succeeded, but a command in it raised an exception.

        A shell goes on after a command that fails, and ends with the exit code of its last command.
        """
        if not self._plan.script[0].endswith("sh"):
            return
        tails = map(self._output.stderr_tail, range(self._plan.world_size))
        if tail := next((tail for tail in tails if "Traceback (most" in tail), ""):
            from shoal_toolkit.result.diagnosis import find_cause

            write_log(
                f"the script ended with exit code 0, but a command in it raised an exception: "
                f"{find_cause(tail, 1).head}\nFix: begin the script with `set -euo pipefail`, or handle the exception."
            )

    def _describe(self, rank: int) -> str:
        """A number past the plan's ranks is a script outside the distribution."""
        host = self.host_of.get(rank, "an unknown host")
        if rank >= self._plan.world_size:
            return f"the script on {host}, outside the distribution,"
        return f"rank {rank} on {host}"


def explain(failure: Failure) -> Result:
    """Returns the result of a failure, with the text of the failure file."""
    from shoal_toolkit.result.diagnosis import explain_failure  # not needed by a job that succeeds

    return Result(failure.exit_code, explain_failure(failure))
