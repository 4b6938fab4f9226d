"""A host with more than a plain script: set-up commands, ranks of a launcher, sidecars, restarts, or other hosts."""

from __future__ import annotations

import time
from collections.abc import Sequence

from shoal_toolkit.result.result import describe_exit_code, remove_script_failure
from shoal_toolkit.run.host import Host
from shoal_toolkit.run.processes import HostEvents, HostProcesses

_MIN_DRAIN_SECONDS = 1.0  # for a last upload if the script took the whole grace period


class LaunchingHost(Host, HostEvents):
    """The common part of a first host and a worker."""

    processes: HostProcesses | None

    def make_processes(self) -> HostProcesses:
        processes = HostProcesses(self.loop, self.flow, self.plan, self.task.environ, self, self.output.reads_all)
        if self.task.warm is not None:
            processes.adopt_standby(self.task.warm)
        if self.task.may_restart or self.plan.forks_ranks:
            processes.keep_standby()
        return processes

    def replan_with(self, hosts: Sequence[str]) -> None:
        """Plans the next start with these hosts, and notes them for job.json. Without processes it does nothing.

        Raises TrainError if there is no such plan.
        """
        if tuple(hosts) == self.plan.hosts or self.processes is None or self.task.plan_with is None:
            return
        plan = self.task.plan_with(hosts)
        self.task = self.task._replace(plan=plan)
        self.processes.replace_plan(plan)
        self.report.update(hosts=list(hosts), ranks=plan.world_size)

    def forget_earlier_start(self) -> None:
        """Forgets what ranks wrote before a restart: the end of their stderr, and the failure file.

        Call it at the next start. Until all hosts are ready for that, ranks of the earlier one may still write.
        """
        self.output.forget_tails()
        self.failed_children.clear()
        remove_script_failure(self.task.paths)

    def drain_sidecars(self) -> None:
        """Lets sidecars finish within the rest of the grace period, at least 1 s. A second signal ends the wait."""
        processes = self.processes
        if processes is None or not processes.draining:
            return
        processes.end_sidecars()
        remaining = min(self.task.settings.stop_grace, self.grace_ends - time.monotonic())
        self.run_until(lambda: not processes.draining or self.hurried, max(_MIN_DRAIN_SECONDS, remaining))


def describe_sidecar_end(name: str, host: str, code: int) -> str:
    """Returns the message for a sidecar that ended before the job.

    Args:
        name: The name of the sidecar.
        host: The host on which it ran.
        code: Its exit code.
    """
    return f"{name} on {host} {describe_exit_code(code)} before the job was over. Its output is in the log."
