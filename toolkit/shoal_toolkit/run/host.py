"""The common part of the first host and a worker: processes, output, and an orderly end with one result."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence

from shoal_toolkit import redact
from shoal_toolkit.errors import FAILED, TrainError
from shoal_toolkit.fast_typing import TYPE_CHECKING, Any, NamedTuple, Protocol
from shoal_toolkit.job.contract import Cluster, Paths
from shoal_toolkit.job.settings import REPORTED_VARIABLES, TrainSettings, is_members_only
from shoal_toolkit.log import STDERR, write_log
from shoal_toolkit.output.output import Output
from shoal_toolkit.output.pipes import FlowControl
from shoal_toolkit.plan.plan import LaunchPlan
from shoal_toolkit.result.result import (
    METRICS,
    Failure,
    Result,
    write_provisional_failure,
    write_result,
)
from shoal_toolkit.run.script import HostScript, ScriptEvents
from shoal_toolkit.system.loop import PASSED_SIGNALS, STOP_SIGNALS, Loop
from shoal_toolkit.system.memory import count_oom_kills

if TYPE_CHECKING:  # only `shoal run --watch` has one
    from shoal_toolkit.run.warm import Warm

_KILL_SECONDS = 10.0
_UNREAD_SECONDS = 1.0
_ECHO_SECONDS = 2.0
# In the traceback of a process of multiprocessing (spawn or forkserver) that can't import the script.
_CHILD_FAILED = b", in _fixup_main_from_"
_MAX_FAILED_CHILDREN = 10  # of a rank: a Pool starts them again for ever
_CHILD_HINT = (
    "a process that the script started failed while it imported the script. Fix: put the code that starts processes "
    'below `if __name__ == "__main__":`'
)


class HostTask(NamedTuple):
    """The task of this host: a plan, or the error that prevented one and is reported to the other hosts."""

    paths: Paths
    cluster: Cluster
    hosts: tuple[str, ...]  # the one that leads the job first
    plan: LaunchPlan | TrainError
    settings: TrainSettings
    environ: Mapping[str, str]
    began: float  # time.monotonic() when `train` started
    preflight: bool = False  # check the hosts, start nothing, and write no result
    plan_with: Callable[[Sequence[str]], LaunchPlan] | None = None  # plans a start with some of the hosts
    warm: Warm | None = None  # a standby that was started before the job

    @property
    def least_hosts(self) -> int:
        """How many hosts a start needs; fewer than all for an elastic job."""
        return len(self.hosts) if self.preflight else self.settings.min_hosts or len(self.hosts)

    @property
    def may_restart(self) -> bool:
        return not self.preflight and (self.settings.max_restarts > 0 or self.least_hosts < len(self.hosts))

    @property
    def is_plain(self) -> bool:
        """Whether the only host runs one script, once: without set-up, ranks of a launcher, sidecars and restarts."""
        plan = self.plan
        if self.preflight or self.may_restart or len(self.hosts) > 1 or not isinstance(plan, LaunchPlan):
            return False
        if self.warm is not None:
            return False
        return not (plan.has_ranks or plan.setup or plan.sidecars or is_members_only(self.environ))


class Role(ScriptEvents, Protocol):
    """The differences between the roles of a host: the only host of a plain script, first host, and worker."""

    def make_processes(self) -> HostScript:
        """Returns the processes of this host, of which none runs yet. Only for hosts that have a plan."""

    def begin(self) -> None:
        """Starts to connect to the other hosts, and to set up this one."""

    def stop(self, number: int) -> None:
        """Stops the job after a signal; the script has the grace period to end."""

    def kill(self) -> None:
        """Ends a job that is being stopped at once."""

    def drain_sidecars(self) -> None:
        """Lets sidecars finish within the rest of the grace period."""

    def send_result(self, result: Result) -> None:
        """Sends the result to the other hosts, or confirms it."""

    def fail_rank(self, rank: int, result: Result) -> None:
        """Ends the job with a result: a rank runs on, but can't succeed."""

    def close(self) -> None:
        """Closes connections and sockets."""


class Host(Role):
    """One host's run, from its start to its result. Creating it learns the secrets to mask, and takes over the log."""

    def __init__(self, task: HostTask) -> None:
        self.task = task
        self.name = task.cluster.current_host
        self.has_plan = isinstance(task.plan, LaunchPlan)
        secrets = {**task.environ, "SHOAL_JOB_SECRET": task.settings.secret}
        redact.learn_secrets({**secrets, **(self.plan.env if self.has_plan else {})})
        self.loop = Loop()
        self.flow = FlowControl()
        self.output = self._make_output()
        self._oom_kills = count_oom_kills()
        self.failed_children: dict[int, int] = {}  # rank → number
        self.result: Result | None = None
        self.report: dict[str, Any] = make_report(task)
        self.stopped_by = 0  # the signal that stops the job
        self.grace_ends = float("inf")  # time.monotonic(), once the job is being stopped
        self._signalled_here = self.hurried = self._gave_up = False
        self._echo_ends = self._first_start = 0.0
        self.processes = self.make_processes() if self.has_plan else None

    @property
    def plan(self) -> LaunchPlan:
        """The plan of this host. Only for hosts that have one."""
        assert isinstance(self.task.plan, LaunchPlan)
        return self.task.plan

    def write_rank_output(self, stream: int, rank: int, host: str, data: bytes) -> None:
        """Writes output of a rank. Logs that a process of it can't import the script, and ends the job after several.

        Such a process never works. A name that two reads divide is not counted.
        """
        self.output.write_rank(stream, rank, host, data)
        if stream != STDERR or self.stopped_by or not (count := data.count(_CHILD_FAILED)):
            return
        if not self.failed_children:
            write_log(_CHILD_HINT)
        before = self.failed_children.get(rank, 0)
        self.failed_children[rank] = before + count
        if before < _MAX_FAILED_CHILDREN <= before + count:
            from shoal_toolkit.run.rank_table import explain

            stderr = self.output.stderr_tail(rank)
            reason = "The processes that the script starts fail while they import the script, again and again."
            killed = Failure(128 + signal.SIGKILL, f"rank {rank} on {host}", self.plan.script, stderr, reason=reason)
            self.fail_rank(rank, explain(killed)._replace(exit_code=FAILED))

    def note_start(self) -> None:
        """Notes that a rank has started. The first start sets `launch_seconds` in the report."""
        if not self._first_start:
            self._first_start = time.monotonic()
            self.report["launch_seconds"] = round(self._first_start - self.task.began, 3)

    def note_end(self) -> None:
        """Sets `training_seconds` in the report, if a rank has started."""
        if self._first_start:
            self.report["training_seconds"] = round(time.monotonic() - self._first_start, 3)

    def _make_output(self) -> Output:
        """Returns the writer to stdout and stderr. Log lines go through it from now on."""
        settings = self.task.settings
        as_json, metrics = settings.log_format == "json", None
        if not self.has_plan:
            return Output(self.loop, self.flow, False, as_json, None, settings.as_events)
        if self.plan.metrics:
            from shoal_toolkit.output.metrics import MetricsFile

            metrics = MetricsFile(f"{self.task.paths.output}/{METRICS}", self.plan.metrics)
        # Lines need a prefix if several ranks share the log.
        prefixed = self.plan.has_ranks and self.plan.world_size > 1
        return Output(self.loop, self.flow, prefixed, as_json, metrics, settings.as_events)

    def run(self) -> int:
        """Runs the job to its result, writes the result files, and sends the result to the other hosts.

        At the end, also after an error, it kills the processes and closes everything. Returns the exit code of `train`.
        """
        self.loop.on_signals(STOP_SIGNALS, self._on_signal)
        self.loop.on_signals(PASSED_SIGNALS, self._pass_on)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (*STOP_SIGNALS, *PASSED_SIGNALS))
        try:
            self.begin()
            self.loop.run_until(lambda: self.result is not None and (self._gave_up or not self._runs()))
            return self._finish()
        finally:
            if self.processes is not None:
                self.processes.kill()
                self.processes.close()
            self.close()
            self.output.close()
            self.loop.close()

    def _pass_on(self, number: int) -> None:
        """Gives a signal to the script on this host. A process without a handler would die of it, and gets none."""
        count = self.processes.pass_on(number) if self.processes is not None else 0
        name = signal.Signals(number).name
        write_log(
            f"{name}: passed on to {count} processes of the script"
            if count
            else f"{name} has no effect: no process of the script has a handler for it"
        )

    def set_result(self, result: Result) -> None:
        """Ends the job with a result, and kills what still runs here. Only the first result counts.

        After 10 s it no longer waits for a process that was killed.
        """
        if self.result is not None:
            return
        self.result = result
        if self.processes is not None:
            self.processes.kill()  # also a start that still waits for the standby
        if self._runs():
            self.loop.call_later(_KILL_SECONDS, self._give_up)

    def _give_up(self) -> None:
        write_log("a process does not end although it was killed; ending without it")
        self._gave_up = True

    def _runs(self) -> bool:
        return self.processes is not None and self.processes.running

    def _finish(self) -> int:
        """Writes output and result files, sends the result, and lets sidecars finish. Returns the exit code."""
        assert self.result is not None
        self._write_output()
        code = self._record(self.result)
        if code != self.result.exit_code:
            self.result = Result(code, f"On {self.name} the result could not be written: its log says why.")
        self.send_result(self.result)
        self.drain_sidecars()
        self._write_output()  # log lines about the end
        return code

    def _record(self, result: Result) -> int:
        if not self.task.preflight:
            return write_result(self.task.paths, result, {**self.report, **self._describe_plan()})
        if result.message:
            write_log(result.message)
        return result.exit_code

    def _describe_plan(self) -> dict[str, Any]:
        """Returns the plan for job.json of the first host, with masked secrets; empty on other hosts."""
        if not (self.has_plan and self.plan.is_first):
            return {}
        try:
            from shoal_toolkit.plan.explain import plan_to_dict
        except ImportError as error:  # the script has removed packages, which does not change its result
            write_log(f"job.json has no plan: {error}")
            return {}
        names = self.task.environ.get(REPORTED_VARIABLES, "").split()
        variables = {name: self.task.environ[name] for name in names if name in self.task.environ}
        plan = redact.mask_json(plan_to_dict(self.plan))
        return {"plan": {**plan, "variables": redact.mask_environment(variables)}}

    def run_until(self, finished: Callable[[], bool], seconds: float) -> bool:
        """Serves events until `finished()` or the time limit; returns whether the limit was reached."""
        late: list[bool] = []
        timer = self.loop.call_later(seconds, lambda: late.append(True))
        self.loop.run_until(lambda: finished() or bool(late))
        timer.cancel()
        return bool(late)

    def _write_output(self) -> None:
        """Writes all output, as long as that takes. A stopped job waits 1 s for the reader of its log."""
        self.output.flush()
        if not self.stopped_by:
            self.loop.run_until(lambda: self.output.empty)
        elif self.run_until(lambda: self.output.empty, _UNREAD_SECONDS):
            self.output.drop()

    def collect_facts(self) -> dict[str, int]:
        """Returns facts about this host that may explain a failure: memory, full disks, GPUs, and a rehearsal.

        The last two are 0 until this host has its plan.
        """
        from shoal_toolkit.system.failure_facts import collect_disk_facts, collect_memory_facts

        variables = self.plan.env if self.has_plan else {}
        devices = {"gpus": int(variables.get("SM_NUM_GPUS", 0)), "rehearsal": int("SHOAL_REHEARSE" in variables)}
        return {**collect_memory_facts(self._oom_kills), **collect_disk_facts(), **devices}

    def _on_signal(self, number: int) -> None:
        """The first signal to this host stops the job, the second one kills it. All hosts may get one at once."""
        name = signal.Signals(number).name
        # Slurm sends SIGTERM twice at a time limit: one that follows at once does not count.
        if number == signal.SIGTERM and time.monotonic() < self._echo_ends:
            return
        self._echo_ends = time.monotonic() + _ECHO_SECONDS
        if self._signalled_here:
            write_log(f"received {name} again: killing the ranks now")
            self.hurried = True
            self.kill()
            return
        self._signalled_here = True
        write_log(
            f"received {name}: stopping; the script has {self.task.settings.stop_grace} s to end "
            "(SHOAL_STOP_GRACE), if the container is given as long"
        )
        if self.note_stop(number):
            self.stop(number)

    def note_stop(self, number: int) -> bool:
        """Marks the job as stopped, and starts the grace period. Returns False if it was stopped already.

        Writes a provisional failure file, unless the job has a result or this is a preflight.
        """
        if self.stopped_by:
            return False
        self.stopped_by = number
        self.grace_ends = time.monotonic() + self.task.settings.stop_grace
        if self.result is None and not self.task.preflight:
            write_provisional_failure(self.task.paths, Result.from_signal(number))
        return True


def make_report(task: HostTask) -> dict[str, Any]:
    """Returns the first content of job.json. Values that are not known yet are None."""
    plan = task.plan if isinstance(task.plan, LaunchPlan) else None
    return {
        "hosts": list(task.cluster.hosts),
        "current_host": task.cluster.current_host,
        "ranks": plan.world_size if plan else None,
        "launcher": plan.launcher.name if plan else None,
        "interface": plan.interface if plan else None,
        "launch_seconds": None,
        "training_seconds": None,
        "restarts": [],
        "exit_code": None,
        "began": round(time.time() - (time.monotonic() - task.began), 3),
    }
