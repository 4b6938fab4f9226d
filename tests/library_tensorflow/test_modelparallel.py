"""smdistributed.modelparallel.tensorflow, on real ranks."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from tests.launching import Alone, Mpirun, TwoRanks
from tests.repeats import in_soak

RANKS = Path(__file__).parent / "ranks"
LOADS = """
import sys
sys.modules["smdistributed"] = None
import numpy as np, tensorflow as tf
X, outputs = np.random.RandomState(0).standard_normal((8, 6)).astype(np.float32)[:4], np.load(sys.argv[2])
model = tf.keras.models.load_model(sys.argv[1])
np.testing.assert_allclose(model(X).numpy(), outputs, rtol=0, atol=1e-6)
doubles = tf.constant(X, tf.float64)  # what the script called it with
np.testing.assert_allclose(model.signatures["serving_default"](doubles)["output_0"], outputs, rtol=0, atol=1e-6)
print("loaded", len(model.variables))
"""


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("ranks", "parameters", "cases"),
    [
        (1, {"partitions": 1, "microbatches": 4}, "dense:get"),
        (2, {"partitions": 2, "microbatches": 1}, "dense:get dense:compute clipped regularized"),
        (2, {"partitions": 2, "microbatches": 4}, "skips legacy:get tied pinned frozen headless clipped_legacy scaled"),
        (2, {"partitions": 2, "microbatches": 2, "pipeline": "simple"}, "images masked sequential borrowing"),
        (2, {"partitions": 2, "microbatches": 2, "pipeline": "simple"}, "words"),  # tracing each microbatch takes 2 s
        in_soak(4, {"partitions": 4, "microbatches": 1}, "dense"),
        (4, {"partitions": 4, "microbatches": 4}, "transformer"),
        in_soak(4, {"partitions": 2, "microbatches": 2, "horovod": True}, "legacy:get"),
        (4, {"partitions": 2, "microbatches": 2, "ddp": True, "placement_strategy": "spread"}, "nested"),
    ],
)
def test_training_is_that_of_one_piece(mpirun: Mpirun, ranks: int, parameters: dict[str, object], cases: str) -> None:
    output = mpirun(ranks, RANKS / "modelparallel.py", json.dumps(parameters), *cases.split())
    assert output.count("equal") == ranks


@pytest.mark.mpi
def test_steps_follow_each_other(mpirun: Mpirun) -> None:
    assert mpirun(2, RANKS / "modelparallel_steps.py").count("equal") == 2


@pytest.mark.mpi
def test_what_is_saved_is_read(mpirun: Mpirun, alone: Alone, tmp_path: Path) -> None:
    """Of two replicas of two stages."""
    ranks = 4
    trained = losses(mpirun(ranks, RANKS / "modelparallel_saved.py", tmp_path, "train"), ranks)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["mp_rank_0", "mp_rank_1"]
    assert alone("-c", LOADS, tmp_path / "model", tmp_path / "outputs.npy").split() == ["loaded", "12"]
    assert losses(mpirun(ranks, RANKS / "modelparallel_saved.py", tmp_path, "resume"), ranks) == trained[2:]


def losses(output: str, ranks: int) -> list[str]:
    """Those that all ranks have printed."""
    lines = [line for line in output.splitlines() if line.startswith("losses ")]
    assert len(lines) == ranks
    (line,) = set(lines)
    return line.split()[1:]


REFUSED = {
    "outside": "StepUsageError: The model 'model' is called outside of a step",
    "batch": "MicrobatchError: x, of shape (3, 6), has 3 along axis 0: that must be a multiple of 'microbatches', 2.",
    "loop": "SMPUnsupportedError: Layer 'dense' is called inside a loop, a branch or a tf.function",
    "branch": "SMPUnsupportedError: The model 'model' is called inside a loop, a branch or a tf.function",
    "variable": "SMPUnsupportedError: The model's call() uses the variable model/dense/kernel outside of the layer",
    "add_loss": "SMPUnsupportedError: 'model' adds a loss and is cut",
    "again": "SMPUnsupportedError: An input of a model comes from an earlier call",
    "nested": "StepUsageError: A function under smp.step is called inside a step",
    "frozen": "SMPRuntimeError: Stage 0 computes gradients, and stage 1, which uses output 0 of dense, computes none",
    "pinned": "SMPConfigError: smp.partition(2) puts layer 'dense_2' on a stage that does not exist",
    "jit": "leave jit_compile=True out of the tf.function",
    "jit_step": "SMPUnsupportedError: smp.step(jit_compile=True): XLA cannot send and receive",
    "option": "smp.step() got an unexpected keyword argument 'non_split_input'. Did you mean 'non_split_inputs'?",
    "average": "TypeError: allreduce() got an unexpected keyword argument 'averages'. Did you mean 'average'?",
    "profile": "UserWarning: profile() has no effect",
    "clip": "UserWarning: tf.clip_by_global_norm has the norm of this stage's gradients, not of all",
    "accumulate": "SMPConfigError: accumulate(method='sum') is unknown. Allowed: 'variable'",
}


@pytest.mark.mpi
def test_what_cannot_be_is_refused(mpirun: Mpirun) -> None:
    """By all ranks, one after the other in one job: each leaves the library in order for the next."""
    output = mpirun(2, RANKS / "modelparallel_refused.py", *REFUSED)
    # A warning is printed on the first rank alone.
    expected = dict.fromkeys(REFUSED.values(), 2) | {REFUSED["profile"]: 1}
    assert {text: output.count(text) for text in REFUSED.values()} == expected, output


@pytest.mark.mpi
@pytest.mark.parametrize("case", ["killed", "raises"])
def test_a_rank_that_is_gone_is_named(two_ranks: TwoRanks, free_port: int, case: str) -> None:
    with two_ranks(free_port, RANKS / "modelparallel_refused.py", case) as ranks:
        ranks[1].wait(timeout=120)
        ended = time.monotonic()
        output = ranks[0].communicate(timeout=60)[0]
    assert "Rank 1: connection lost" in output, output
    assert time.monotonic() - ended < 30


@pytest.mark.mpi
@pytest.mark.timeout(120)
def test_a_stage_says_what_it_waits_for_and_records_its_messages(
    two_ranks: TwoRanks, free_port: int, tmp_path: Path
) -> None:
    come = tmp_path / "come"
    environ = {"SMDDP_STALL_SECONDS": "1", "SMP_TIMELINE": str(tmp_path)}
    with two_ranks(free_port, RANKS / "modelparallel_refused.py", come, **environ) as ranks:
        stdout = ranks[0].stdout
        assert stdout is not None
        assert any(line.startswith("smp: rank 0 has waited 1 s for rank 1: its output 0 of") for line in stdout)
        come.touch()
        assert [rank.wait(timeout=60) for rank in ranks] == [0, 0]
    events = json.loads((tmp_path / "smp_timeline_1.json").read_text())
    messages = [event["name"] for event in events if event.get("cat") == "communication"]
    steps, microbatches = 2, 2
    assert messages.count("receive") == steps * microbatches  # activations
    assert messages.count("send") == steps * microbatches * 2  # outputs, and the gradients of activations


@pytest.mark.mpi
def test_what_does_not_come_is_waited_for_until_the_limit(two_ranks: TwoRanks, free_port: int, tmp_path: Path) -> None:
    with two_ranks(free_port, RANKS / "modelparallel_refused.py", tmp_path / "come", SMP_TIMEOUT_SECONDS="5") as ranks:
        output = ranks[0].communicate(timeout=120)[0]
    assert "Rank 1 has not sent its output 0 of" in output, output
    assert (
        "to rank 0 within 5 s. Fix: find out why it is slow; if it may take longer, set SMP_TIMEOUT_SECONDS" in output
    )


REHEARSED = """
import os, runpy, sys, shoal_rehearsal
os.environ["SHOAL_REHEARSE"] = "1"
shoal_rehearsal.activate()
runpy.run_path(sys.argv[1])
"""


@pytest.mark.mpi
def test_horovod_is_stood_in_for_in_rehearsal(mpirun: Mpirun) -> None:
    """On ranks that start warm, with TensorFlow. By the environment alone: test_dataparallel.py."""
    assert mpirun(4, "-c", REHEARSED, RANKS / "modelparallel_horovod.py").count("equal") == 4
