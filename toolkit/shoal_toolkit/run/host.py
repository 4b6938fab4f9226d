"""What the first host and a worker have in common: the work of this host, its output, and the way to an orderly end."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping

from shoal_toolkit import redact
from shoal_toolkit.errors import TrainError
from shoal_toolkit.job.contract import Cluster, Paths
from shoal_toolkit.job.settings import Settings
from shoal_toolkit.light_typing import TYPE_CHECKING, Any, NamedTuple
from shoal_toolkit.log import say
from shoal_toolkit.output.output import Output, defines_metrics
from shoal_toolkit.output.streams import Flow
from shoal_toolkit.plan.plan import LaunchPlan
from shoal_toolkit.result import result
from shoal_toolkit.result.result import Result
from shoal_toolkit.run.work import Events, Work
from shoal_toolkit.system import disks, oom
from shoal_toolkit.system.loop import Loop

if TYPE_CHECKING:  # few jobs have them
    from shoal_toolkit.output.metrics import Metrics

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_KILL_SECONDS = 10.0
_UNREAD_SECONDS = 1.0
_LEAST_DRAIN_SECONDS = 1.0  # for a last upload, where the script took all of the grace period


class Task(NamedTuple):
    """What this host has to do: a plan, or the reason why there is none, which the other hosts are told too."""

    paths: Paths
    cluster: Cluster
    hosts: tuple[str, ...]  # the one that leads the job first
    plan: LaunchPlan | TrainError
    settings: Settings
    environ: Mapping[str, str]
    began: float  # time.monotonic() at which `train` started


class Host:
    """One host's run, from its start to its result. The two roles fill in what they do on each event."""

    def __init__(self, task: Task) -> None:
        task, metrics = _with_metrics(task)
        plan = task.plan
        secrets = {**task.environ, "SHOAL_JOB_SECRET": task.settings.secret}
        redact.learn({**secrets, **(plan.env if isinstance(plan, LaunchPlan) else {})})
        self.task = task
        self.loop = Loop()
        self.flow = Flow()
        self.output = Output(self.loop, self.flow, _marks(task), task.settings.log_format == "json", metrics)
        self._kills = oom.kills()
        self.work: Work | None = None
        self.result: Result | None = None
        self.report: dict[str, Any] = first_report(task)
        self.stopped_by = 0
        self._grace_ends = float("inf")  # time.monotonic(), once the job is being stopped
        self._signalled_here = self._hurried = False
        self._over = False
        if isinstance(task.plan, LaunchPlan):
            events = Events(
                self.rank_started,
                self.rank_ended,
                self.rank_output,
                self.launcher_said,
                self.work_ended,
                self.companion_ended,
            )
            self.work = Work(self.loop, self.flow, task.plan, task.environ, events, self.output.reads_all)

    def run(self) -> int:
        """Run to the result; returns the exit code of `train`."""
        self.loop.on_signals(STOP_SIGNALS, self._signalled)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        try:
            self.begin()
            self.loop.run_until(lambda: self.result is not None and (self._over or not self._work_runs()))
            return self._finish()
        finally:
            if self.work is not None:
                self.work.kill()
                self.work.close()
            self.close()
            self.output.close()
            self.loop.close()

    def decide(self, decided: Result) -> None:
        """The job is over: the first result counts. What still runs here is ended."""
        if self.result is not None:
            return
        self.result = decided
        if self._work_runs() and self.work is not None:
            self.work.kill()
            self.loop.call_later(_KILL_SECONDS, self._give_up)

    def _give_up(self) -> None:
        say("a process does not end although it was killed; ending without it")
        self._over = True

    def _work_runs(self) -> bool:
        return self.work is not None and self.work.running

    def _drain_companions(self) -> None:
        """What runs beside the script may finish what it has begun: in the grace period, of which a stop leaves a rest.

        A second signal ends that too.
        """
        if self.work is None or not self.work.draining:
            return
        self.work.end_companions()
        late: list[bool] = []
        rest = min(self.task.settings.stop_grace, self._grace_ends - time.monotonic())
        timer = self.loop.call_later(max(_LEAST_DRAIN_SECONDS, rest), lambda: late.append(True))
        work = self.work
        self.loop.run_until(lambda: not work.draining or bool(late) or self._hurried)
        timer.cancel()

    def _finish(self) -> int:
        assert self.result is not None
        self._drain()
        code = result.conclude(self.task.paths, self.result, self.report)
        if code != self.result.exit_code:
            here = self.task.cluster.current_host
            self.result = Result(code, f"On {here} the result could not be written: its log says why.")
        self.tell(self.result)
        self._drain_companions()
        self._drain()  # what others said while they ended
        return code

    def _drain(self) -> None:
        """Write all output, for as long as it takes. The loop goes on: the other hosts still hear from this one."""
        self.output.flush()
        late: list[bool] = []
        if self.stopped_by:  # nobody may be reading any more
            self.loop.call_later(_UNREAD_SECONDS, lambda: late.append(True))
        self.loop.run_until(lambda: self.output.empty or bool(late))
        if late:
            self.output.drop()

    def facts(self) -> dict[str, int]:
        """Return what explains a failure here, beside the script's own words."""
        plan = self.task.plan
        gpus = int(plan.env.get("SM_NUM_GPUS", 0)) if isinstance(plan, LaunchPlan) else 0
        return {**oom.facts(self._kills), **disks.facts(), "gpus": gpus}

    def _signalled(self, number: int) -> None:
        """One signal stops, a second one to this host kills. (All hosts may be told at once: one each.)"""
        name = signal.Signals(number).name
        if self._signalled_here:
            say(f"received {name} again: killing the ranks now")
            self._hurried = True
            self.stop_again()
            return
        self._signalled_here = True
        say(
            f"received {name}: stopping; the script has {self.task.settings.stop_grace} s to end "
            "(SHOAL_STOP_GRACE), if the container is given as long"
        )
        if self.note_stop(number):
            self.stop(number)

    def note_stop(self, number: int) -> bool:
        """From now on the job is being stopped; returns whether it was not before."""
        if self.stopped_by:
            return False
        self.stopped_by = number
        self._grace_ends = time.monotonic() + self.task.settings.stop_grace
        if self.result is None:
            result.foretell(self.task.paths, result.of_stop(number))
        return True

    # What a role does.

    def begin(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def tell(self, decided: Result) -> None:
        raise NotImplementedError

    def stop(self, number: int) -> None:
        raise NotImplementedError

    def stop_again(self) -> None:
        raise NotImplementedError

    def rank_started(self, rank: int) -> None:
        raise NotImplementedError

    def rank_ended(self, rank: int, code: int) -> None:
        raise NotImplementedError

    def rank_output(self, stream: int, rank: int, data: bytes) -> None:
        raise NotImplementedError

    def launcher_said(self, stream: int, data: bytes) -> None:
        raise NotImplementedError

    def work_ended(self, code: int) -> None:
        raise NotImplementedError

    def companion_ended(self, name: str, code: int) -> None:
        raise NotImplementedError


def _marks(task: Task) -> bool:
    """Whether lines need the mark of their rank: several ranks share a log."""
    plan = task.plan
    return isinstance(plan, LaunchPlan) and plan.has_ranks and plan.world_size > 1


def metrics_of(paths: Paths, plan: LaunchPlan) -> Metrics | None:
    """Return the metrics that a job defines, if any. Raises ContractError."""
    if not defines_metrics(paths, plan.cwd):
        return None
    from shoal_toolkit.output.metrics import read_metrics

    return read_metrics(paths, plan.cwd)


def _with_metrics(task: Task) -> tuple[Task, Metrics | None]:
    """Read the definitions of metrics. Where they are wrong, that is why there is no plan."""
    plan = task.plan
    if not isinstance(plan, LaunchPlan):
        return task, None
    try:
        return task, metrics_of(task.paths, plan)
    except TrainError as error:
        return task._replace(plan=error), None


def companion_failure(name: str, host: str, code: int) -> str:
    """Say that what should have run as long as the job has ended before."""
    return f"{name} on {host} {result.exit_description(code)} before the job was over. Its output is in the log."


def first_report(task: Task) -> dict[str, Any]:
    """The job.json of a job that has just begun."""
    report: dict[str, Any] = {
        "hosts": list(task.cluster.hosts),
        "current_host": task.cluster.current_host,
        "ranks": None,
        "launcher": None,
        "interface": None,
        "launch_seconds": None,
        "training_seconds": None,
        "exit_code": None,
        "began": round(time.time() - (time.monotonic() - task.began), 3),
    }
    if isinstance(task.plan, LaunchPlan):
        report.update(ranks=task.plan.world_size, launcher=task.plan.launcher, interface=task.plan.interface)
    return report
