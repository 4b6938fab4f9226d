"""`smdistributed.modelparallel.torch` on real ranks: see ranks/modelparallel.py."""

from __future__ import annotations

import json
import re
import subprocess
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.library.conftest import TORCH, clean_environment
from tests.repeats import SEED, SOAK, times

from smdistributed.modelparallel.backend.config import Config
from smdistributed.modelparallel.backend.exceptions import SMPRuntimeError
from smdistributed.modelparallel.backend.schedule import Schedule, Slot, TurnKind
from smdistributed.modelparallel.torch.pipeline import failures
from smdistributed.modelparallel.torch.pipeline.failures import StageObserver
from smdistributed.modelparallel.torch.pipeline.messages import MessageKind, StageMessage
from smdistributed.modelparallel.torch.pipeline.scheduler import RunningStep, Scheduler
from smdistributed.modelparallel.torch.pipeline.stage import Stage
from smdistributed.modelparallel.torch.pipeline.tasks import StageTask
from smdistributed.modelparallel.torch.script import verification
from smdistributed.modelparallel.torch.script.buckets import Replicas
from smdistributed.modelparallel.torch.script.gradients import Reducer

if TYPE_CHECKING:
    from tests.library.conftest import Alone, Mpirun, Python

ALL = {"ALL": "1"} if SOAK else {}
RANKS = Path(__file__).parent / "ranks/modelparallel.py"
OPTIONS = RANKS.with_name("modelparallel_options.py")
FAILING = Path(__file__).parent / "ranks/modelparallel_failing.py"
PYTHON = "import os, subprocess, sys; python = [*os.environ['PYTHON'].split(), *sys.argv[1:]]; "
WITH_ERRORS = PYTHON + "subprocess.run(python, check=True, stderr=1)"


def job(mpirun: Mpirun, ranks: int, stages: int, *case: object, **environ: str) -> str:
    return mpirun(ranks, RANKS, *case, STAGES=str(stages), **environ)


@pytest.mark.long
@pytest.mark.mpi
@pytest.mark.soak
@pytest.mark.parametrize(
    ("ranks", "stages", "optimizers"),
    [
        pytest.param(1, 1, ["sgd", "adam"], marks=pytest.mark.once),
        (2, 2, ["sgd", "adam"]),
        pytest.param(4, 2, ["adam"], marks=pytest.mark.once),
    ],
)
def test_training_equals_that_of_one_process(mpirun: Mpirun, ranks: int, stages: int, optimizers: list[str]) -> None:
    assert job(mpirun, ranks, stages, "against_one_process", *optimizers, **ALL).count("equal:") == ranks


@pytest.mark.long
@pytest.mark.mpi
def test_gradients_leave_a_stage_from_autograds_thread_as_on_a_gpu(mpirun: Mpirun) -> None:
    assert job(mpirun, 2, 2, "against_one_process", "sgd", AS_ON_A_GPU="1").count("equal:") == 2
    assert job(mpirun, 3, 3, "random_models", SEED, 4, AS_ON_A_GPU="1").count("random") == 3


@pytest.mark.long
@pytest.mark.mpi
@pytest.mark.soak
@pytest.mark.parametrize(
    ("ranks", "stages", "single"),
    [(2, 2, "all"), pytest.param(1, 1, 4, marks=pytest.mark.once), pytest.param(4, 2, 4, marks=pytest.mark.once)],
)
def test_every_option_alone_and_in_pairs_trains_as_plain_torch(
    mpirun: Mpirun, tmp_path: Path, ranks: int, stages: int, single: object
) -> None:
    drawn = ("all", "all") if SOAK else (single, 4)
    output = mpirun(ranks, OPTIONS, SEED, *drawn, tmp_path, STAGES=str(stages))
    assert output.count("options: ") == ranks


@pytest.mark.mpi
def test_a_models_stages_are_gathered_and_given_up_again(mpirun: Mpirun) -> None:
    assert job(mpirun, 2, 2, "gathered").count("gathered") == 2


@pytest.mark.long
@pytest.mark.mpi
@pytest.mark.once
@pytest.mark.soak
def test_training_on_many_stages_equals_that_of_one_process(mpirun: Mpirun) -> None:
    ranks = times(4, 8)
    assert job(mpirun, ranks, ranks, "against_one_process", "adam", **ALL).count("equal:") == ranks


@pytest.mark.mpi
def test_partition_by_hand_random_numbers_uneven_batches_and_messages(mpirun: Mpirun) -> None:
    cases = ["manual", "dropout", "uneven", "ranks", "without_fast_path"]
    cases += ["half"] if TORCH >= (2, 2) else []  # before: not on the CPU
    output = job(mpirun, 3, 3, ",".join(cases))
    assert [output.count(case) for case in cases] == [3] * len(cases)


@pytest.mark.mpi
@pytest.mark.soak
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.once)])
def test_models_drawn_at_random_have_the_gradients_that_they_have_alone(mpirun: Mpirun, ranks: int) -> None:
    assert job(mpirun, ranks, ranks, "random_models", SEED, times(4, 40)).count("random") == ranks


@pytest.mark.mpi
def test_replicas_accumulate_clip_scale_and_share_the_optimizers_state(mpirun: Mpirun) -> None:
    output = job(mpirun, 4, 2, "options,habits,evaluates,released")
    assert [output.count(word) for word in ("options", "habits", "evaluates", "released")] == [4, 4, 4, 4]


@pytest.mark.mpi
@pytest.mark.once
@pytest.mark.parametrize(("asked", "backend"), [("auto", "smddp"), ("gloo", "gloo")])
def test_replicas_average_on_the_backend_asked_for(mpirun: Mpirun, asked: str, backend: str) -> None:
    output = job(mpirun, 2, 1, "backends,uneven,joins", BACKEND=asked)
    assert (output.count(f"backends {backend}"), output.count("uneven"), output.count("joins")) == (2, 2, 2)


@pytest.mark.once
@pytest.mark.mpi
def test_steps_are_verified_against_the_same_without_stages(mpirun: Mpirun) -> None:
    output = mpirun(4, "-c", WITH_ERRORS, RANKS, "verified", STAGES="2")
    assert output.count("is as without stages") == 6
    assert output.count("refused: SMP_VERIFY_STEPS: step 7 differs from the same without stages in:") == 4
    assert "the gradient of layers." in output


@pytest.mark.mpi
@pytest.mark.once
def test_construction_without_memory_does_not_depend_on_the_number_of_stages(mpirun: Mpirun) -> None:
    output = [job(mpirun, ranks, ranks, "delayed") for ranks in (1, 3)]
    assert len({loss for text in output for loss in re.findall(r"delayed ([\d.]+)", text)}) == 1


@pytest.mark.long
@pytest.mark.mpi
def test_checkpoints_resume_and_a_partial_one_on_another_number_of_stages(mpirun: Mpirun, tmp_path: Path) -> None:
    cases = ("checkpoints", "shards", "mixed", "resumed_dropout")
    output = job(mpirun, 4, 2, ",".join(cases), tmp_path)
    assert [output.count(word) for word in ("checkpoints", "shards", "mixed", "drops")] == [4, 4, 4, 4]
    resumed = [job(mpirun, ranks, ranks, "resharded", tmp_path) for ranks in (1, 3)]
    assert len({losses for text in resumed for losses in re.findall(r"resharded ([\d. ]+)", text)}) == 1


def test_ranks_finish_the_renames_of_a_killed_job_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from smdistributed.modelparallel.torch.script import partial_checkpoints

    (tmp_path / ".tag_partial.old").mkdir()
    rename = Path.rename
    monkeypatch.setattr(Path, "rename", lambda *names: (rename(*names), rename(*names)))  # another rank's before
    partial_checkpoints.finish_rename(tmp_path / "tag_partial")
    assert [path.name for path in tmp_path.iterdir()] == ["tag_partial"]


@pytest.mark.long
@pytest.mark.mpi
@pytest.mark.parametrize(("ranks", "stages"), [(2, 1), pytest.param(4, 2, marks=pytest.mark.once)])
def test_replicas_keep_gradients_copies_and_state_of_their_share(mpirun: Mpirun, ranks: int, stages: int) -> None:
    cases = "adds_up,never_reset,norms,copies"
    output = mpirun(ranks, RANKS.with_name("optimizer_shards.py"), cases, STAGES=str(stages))
    assert [output.count(case) for case in cases.split(",")] == [ranks] * 4, output


@pytest.mark.mpi
@pytest.mark.once
def test_misuse_is_reported_with_its_place(mpirun: Mpirun) -> None:
    output = job(mpirun, 2, 2, "misuse")
    assert output.count("The model is called outside a step") == 2
    assert output.count("model.backward is called outside a step") == 2
    assert output.count("The model is not placed yet") == 2
    assert (
        output.count("tokens, of shape (6, 5), has 6 along axis 0: that must be a multiple of 'microbatches', 4") == 2
    )


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("penalty", "The step on stage 0 uses a parameter of stage 1 outside of its module"),
        pytest.param(
            "eval", "model.eval() is called inside a step: the other stages would not call it", marks=pytest.mark.once
        ),
        pytest.param(
            "optimizer",
            "optimizer.step() is called inside a step: the other stages would not call it",
            marks=pytest.mark.once,
        ),
    ],
)
def test_what_only_the_first_stage_would_do_is_refused(mpirun: Mpirun, case: str, words: str) -> None:
    assert words in job(mpirun, 2, 2, "first_stage_alone", case)


@pytest.mark.mpi
@pytest.mark.once
@pytest.mark.parametrize(
    ("what", "stage", "at"), [("raise", 0, 3), ("raise", 1, 7), ("backward", 1, 6), ("kill", 1, 40)]
)
def test_a_failure_ends_the_step_on_all_stages(mpirun: Mpirun, what: str, stage: int, at: int) -> None:
    """Each rank under a process of its own, so that mpirun does not end the others."""
    output = mpirun(3, "-c", PYTHON + "subprocess.run(python)", RANKS, "fails", what, stage, at, STAGES="3")
    raised = dict(re.findall(r"stage (\d) raised after ([\d.]+) s", output))
    assert set(map(int, raised)) == {0, 1, 2} - ({stage} if what == "kill" else set())
    assert max(map(float, raised.values())) < 30  # the stages would go on for 60 s
    if what == "kill":
        assert f"Stage {stage} (rank {stage}): connection lost" in output
    else:
        assert output.count(f"Stage {stage} (rank {stage}) failed:") == 2
        assert output.count("ArithmeticError: this layer fails") >= 3


@pytest.mark.once
@pytest.mark.soak
def test_a_failure_at_a_random_point_ends_all_ranks(alone: Alone, tmp_path: Path) -> None:
    count = times(5, 40)
    ended = [json.loads(line) for line in alone(FAILING, SEED, count, tmp_path).splitlines()]
    assert len(ended) == count
    for job in ended:
        stage, is_killed = job["stage"], job["how"] == "kill"
        assert job["codes"] == [-9 if is_killed and rank == stage else 1 for rank in range(3)], job
        assert job["seconds"] < 30, job  # a rank that is not informed is killed after 60 s
        own = job["logs"].pop(stage)
        assert "ArithmeticError: this fails" in own or is_killed, job
        in_step = not is_killed and job["where"] != "between"
        what = f"Stage {stage} (rank {stage})" + (" failed:\nTraceback" if in_step else ": connection lost")
        assert all(what in log for log in job["logs"]), job
        assert all(not in_step or 'raise ArithmeticError("this fails")' in log for log in job["logs"]), job


@pytest.mark.mpi
@pytest.mark.once
def test_a_stage_prints_its_wait_and_records_its_work(mpirun: Mpirun, tmp_path: Path) -> None:
    environ = {"STAGES": "2", "SMDDP_STALL_SECONDS": "1", "SMP_TIMELINE": str(tmp_path)}
    environ["SMP_TIMEOUT_SECONDS"] = "2"  # the module takes longer, and the stage that has it lets the other hear of it
    output = mpirun(2, "-c", WITH_ERRORS, RANKS, "stalls", **environ)
    waits = "smp: stage 0 (rank 0), step 1, for 1 s: microbatch 0 waits for the forward of blocks.2 on stage 1 (rank 1)"
    assert waits in output
    assert "smp: stage 1 (rank 1), step 1, for 1 s: it computes microbatch 0, at:" in output
    assert "in forward\n    time.sleep(2.5)" in output
    events = json.loads((tmp_path / "smp_timeline_1.json").read_text())
    found = [(event["name"], event["args"]["microbatch"]) for event in events if event.get("cat") == "compute"]
    assert {("forward", 0), ("forward", 1), ("backward", 0), ("backward", 1)} <= set(found)
    assert [event["name"] for event in events if event.get("cat") == "step"] == ["step 1", "step 2"]


@pytest.mark.once
def test_dataparallel_beside_it_is_refused(python: Python) -> None:
    code = "import smdistributed.dataparallel, smdistributed.modelparallel.torch as smp; smp.init({'partitions': 1})"
    ended = subprocess.run(
        [*python(), "-c", code], env=clean_environment(), capture_output=True, text=True, check=False
    )
    assert ended.returncode == 1
    assert 'Using "modelparallel" and "dataparallel" in one job is not supported' in ended.stderr


class FullTransport:
    """To rank 1 nothing goes out: its socket is full."""

    def __init__(self) -> None:
        self.informed: list[int] = []
        self.emptied = threading.Event()

    def send(self, to: int, head: bytes, bodies: object = ()) -> None:
        if to == 1:
            self.emptied.wait(20)
        self.informed.append(to)


def test_a_failure_reaches_all_stages_that_take_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "_REPORT_SECONDS", 0.2)
    transport: Any = FullTransport()
    failing = Stage(transport, [0, 1, 2], 0, lambda name: None, 1800)
    failing.failures.fail(ValueError("no"))
    failing.leave()  # waits until others are informed, as the process may end
    assert transport.informed == [2]
    transport.emptied.set()


def test_a_stage_fails_at_once_even_if_another_takes_no_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "_REPORT_SECONDS", 600)
    transport: Any = FullTransport()
    failing = Stage(transport, [0, 1, 2], 0, lambda name: None, 1800)
    threading.Thread(target=failing.failures.fail, args=[ValueError("no")], daemon=True).start()
    assert failing.failures.occurred.wait(10), "it waits for rank 1"
    with pytest.raises(ValueError, match="no"):
        failing.begin(Config())
    transport.emptied.set()
    failing.leave()
    assert sorted(transport.informed) == [1, 2]


class Clock:
    """The time of one thread, which sleeps until the test lets time pass."""

    def __init__(self) -> None:
        self._now, self._asleep, self._awake = 0.0, threading.Semaphore(0), threading.Semaphore(0)

    def monotonic(self) -> float:
        return self._now

    def sleep(self, _: float) -> None:
        self._asleep.release()
        self._awake.acquire()

    def wait(self, seconds: float) -> None:
        """Lets time pass, and returns after the thread has looked at the clock."""
        assert self._asleep.acquire(timeout=60)
        self._now += seconds
        self._awake.release()
        assert self._asleep.acquire(timeout=60)
        self._asleep.release()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(failures, "time", made)
    return made


def observer(seconds: float) -> tuple[StageObserver, list[str]]:
    called: list[str] = []
    made = StageObserver("stage 1 (rank 1)", seconds, called.append, lambda: called.append("long turn"))
    made.step_begins(1)
    return made, called


def test_a_stage_waits_no_longer_than_the_limit_after_the_last_message_of_another(clock: Clock) -> None:
    waiting, called = observer(100)
    clock.wait(99)
    assert called == []
    clock.wait(2)
    assert called == ["nobody has called anything here: the first stage may not be in this step"]
    waiting.call_begins(1, lambda: "microbatch 0 waits for the forward of head on stage 2 (rank 2)")
    clock.wait(0)
    assert called[1:] == ["microbatch 0 waits for the forward of head on stage 2 (rank 2)"]
    waiting.message_received()
    clock.wait(99)
    assert len(called) == 2
    clock.wait(2)
    assert len(called) == 3


def test_a_stage_that_computes_for_long_informs_the_others(clock: Clock) -> None:
    computing, called = observer(100)
    computing.turn_begins(task := StageTask(0, TurnKind.FORWARD, 0))
    clock.wait(20)
    assert called == []
    clock.wait(1000)
    assert called == ["long turn"], "it waits for nobody: there is no timeout"
    computing.turn_ends(task)
    clock.wait(99)
    assert called == ["long turn"]


def test_a_message_of_a_stage_that_computes_postpones_the_timeout_of_the_others() -> None:
    transport: Any = FullTransport()
    transport.emptied.set()
    stages = [Stage(transport, [0, 1], rank, lambda name: None, 1800) for rank in (0, 1)]
    stages[0]._report_working()
    for report in stages[0]._working_reports:
        report.join()
    assert transport.informed == [1]
    before = stages[1]._observer._last_event
    stages[1].deliver(StageMessage(MessageKind.WORKING, 0, 1, -1, None, None, []))
    assert stages[1]._observer._last_event > before
    assert stages[1]._early == []


@pytest.mark.parametrize("without_gradients", [torch.no_grad, torch.inference_mode])
def test_a_model_is_placed_in_an_evaluation(without_gradients: Any) -> None:
    parameter, alone = torch.nn.Parameter(torch.ones(2)), Replicas(None, (0,), 1.0)
    with without_gradients():
        reducer = Reducer([("name", parameter)], (alone, alone), False, 1, 1)
    torch.autograd.backward(parameter.sum())
    assert reducer.saw_gradients


def test_orders_of_a_rank_that_is_two_steps_ahead_wait_for_their_step() -> None:
    """Without a backward and without split tensors, ranks of TP_GROUP do not wait for each other."""
    transport: Any = FullTransport()
    transport.emptied.set()
    following = Stage(transport, [0, 1], 0, lambda name: None, 1800, partners=(2, 0))
    for step in (1, 2):
        following.deliver(StageMessage(MessageKind.ORDER, 2, step, -1, None, f"of step {step}", []))
    for step in (1, 2):
        following.begin(Config())
        announced: Any = following._scheduler.step.slot._schedule
        assert list(announced._announced) == [f"of step {step}"]
        following.leave()


@pytest.mark.mpi
@pytest.mark.once
def test_a_stage_without_messages_for_the_limit_fails_and_names_its_wait(mpirun: Mpirun) -> None:
    """The first stage never enters the step."""
    output = mpirun(2, RANKS, "absent", STAGES="2", SMP_TIMEOUT_SECONDS="1")
    silence = "Stage 1 (rank 1) has received nothing from the other stages for 1 s"
    why = f"{silence}, in step 1: nobody has called anything here"
    assert f"says: {why}" in output
    assert "is informed: Stage 1 (rank 1) failed:" in output
    assert output.count(why) == 2
    assert "Fix: find out why it is slow; if it may take longer, set SMP_TIMEOUT_SECONDS higher on all ranks." in output


def test_a_thread_that_ends_after_its_step_finishes_its_microbatch_in_that_step() -> None:
    """The answer of the last backward ends the step, while the thread that has sent it still runs."""
    nobody: Any = None
    scheduler = Scheduler(nobody, nobody, nobody, receives_events=False)
    step = RunningStep(Slot(Schedule(1, False)), False, 0)
    scheduler.begin_step(step)
    scheduler.end_step()
    scheduler.finish_microbatch(step, 0)
    with pytest.raises(SMPRuntimeError, match="none runs"):
        assert scheduler.step


@pytest.mark.parametrize("both", [float("inf"), float("-inf"), float("nan")])
def test_what_overflows_with_and_without_stages_hides_no_other_difference(both: float) -> None:
    expected = torch.tensor([both, 2.0, -4.0])
    error, allowed = verification.compare_tensors(torch.tensor([both, 2.0, -4.0]), expected)
    assert error <= allowed
    error, _ = verification.compare_tensors(torch.tensor([both, 2.0, -3.0]), expected)
    assert error == pytest.approx(0.25)
    error, allowed = verification.compare_tensors(torch.tensor([0.0, 2.0, -4.0]), expected)
    assert not error <= allowed
