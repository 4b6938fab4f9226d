"""shoal_checkpoint with TensorFlow: a killed training goes on exactly, and bad checkpoints are refused."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import tensorflow as tf
from tests.repeats import SEED, only_in_soak, times

import shoal_checkpoint as contract
from shoal_checkpoint.directories import SavedSteps
from shoal_checkpoint.tensorflow import Checkpoint, CheckpointError
from shoal_checkpoint.tensorflow.keras_release import keras_release

if TYPE_CHECKING:
    from tests.launching import Alone, TwoRanks

RESUMING, ELASTIC = (Path(__file__).parent / "ranks" / name for name in ("resuming.py", "elastic.py"))


def steps_of(log: Path, rank: int) -> set[str]:
    return set(Path(f"{log}-{rank}").read_text().splitlines())


def start(
    two_ranks: TwoRanks, way: str, directory: Path, after: float | str | None, number: int, script: Path = RESUMING
) -> list[int]:
    """Train on two ranks; after some seconds, or when a file of this name is there, send them the signal."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    checkpoints = directory / "checkpoints"
    checkpoints.mkdir(parents=True, exist_ok=True)
    with two_ranks(port, script, way, checkpoints, directory / "log") as ranks:
        if after is not None:
            began = time.monotonic()
            while not list(checkpoints.glob(after)) if isinstance(after, str) else time.monotonic() < began + after:
                if any(rank.poll() is not None for rank in ranks):
                    break
                time.sleep(0.001)
            for rank in ranks:
                rank.send_signal(number)
        codes = [rank.wait(120) for rank in ranks]
        assert set(codes) <= {0, -number, contract.STOPPED}, [rank.communicate() for rank in ranks]
    return codes


@pytest.mark.soak
@pytest.mark.parametrize("way", ["fit", "loop"])
def test_killed_at_random_moments_it_trains_as_if_it_had_not_been(
    two_ranks: TwoRanks, tmp_path: Path, way: str
) -> None:
    """With Model.fit, also its metrics and the numbers of its batches; bit for bit, on each rank.

    In the suite, in an epoch and while it saves; at any moment in `make soak`.
    """
    began = time.monotonic()
    start(two_ranks, way, tmp_path / "whole", None, signal.SIGKILL)
    seconds, drawn = time.monotonic() - began, random.Random(SEED)
    ways: list[tuple[float | str, int]] = [("*.partial", signal.SIGKILL), ("*.partial", signal.SIGTERM)]
    ways += [(drawn.uniform(0.1, seconds), signal.SIGKILL) for _ in range(times(0, 30))]
    drawn.shuffle(ways)
    ways.insert(0, ("step-00000008", signal.SIGKILL))  # in the second epoch
    for after, number in ways:
        start(two_ranks, way, tmp_path / "killed", after, number)
    assert start(two_ranks, way, tmp_path / "killed", None, signal.SIGKILL) == [0, 0]
    for rank in range(2):
        assert steps_of(tmp_path / "killed" / "log", rank) == steps_of(tmp_path / "whole" / "log", rank)


@only_in_soak
def test_it_goes_on_with_another_number_of_ranks(two_ranks: TwoRanks, alone: Alone, tmp_path: Path) -> None:
    """One rank goes on at the step of two ranks, and trains to the end; with a global batch, the test below."""
    start(two_ranks, "loop", tmp_path, "*.partial", signal.SIGKILL)
    (step,) = SavedSteps(tmp_path / "checkpoints").steps()[-1:] or [0]
    alone(RESUMING, "loop", tmp_path / "checkpoints", tmp_path / "one")
    lines = Path(f"{tmp_path}/one-0").read_text().splitlines()
    assert int(lines[0].split()[0]) == step and lines[-1].startswith("weights")


@pytest.mark.parametrize("way", ["fit", "loop"])
def test_the_steps_are_the_same_with_2_ranks_then_1(
    two_ranks: TwoRanks, alone: Alone, tmp_path: Path, way: str
) -> None:
    """Killed in an epoch. A step of a single sample leaves the other rank without one."""
    start(two_ranks, way, tmp_path, "step-00000004", signal.SIGKILL, ELASTIC)
    alone(ELASTIC, way, tmp_path / "checkpoints", tmp_path / "resumed")
    alone(ELASTIC, way, tmp_path / "own", tmp_path / "one")
    assert start(two_ranks, way, tmp_path / "two", None, 0, ELASTIC) == [0, 0]
    expected = json.loads((tmp_path / "one").read_text())
    for name in ("resumed", "two/log"):
        assert json.loads((tmp_path / name).read_text()) == pytest.approx(expected, abs=1e-5), name


def make(width: int = 2, optimizer: str = "Adam") -> Any:
    model = tf.keras.Sequential([tf.keras.layers.Dense(width, input_shape=(3,))])
    model.compile(optimizer, "mse")
    return model


def saved_at(directory: Path, *steps: int) -> Path:
    checkpoint = Checkpoint(directory, model=make())
    for checkpoint.step in steps:
        checkpoint.save()
    return directory / f"step-{steps[-1]:08}"


def truncate(path: Path) -> None:
    (data,) = path.glob("*.data*")
    os.truncate(data, data.stat().st_size // 2)


def replace_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def forge(path: Path, pipe: str = "", **changes: Any) -> None:
    saved = json.loads((path / "training.json").read_text())
    (path / "training.json").write_text(json.dumps({**saved, **changes}))
    if pipe:
        replace_by_pipe(path / pipe)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, r"state\.data-00000-of-00001 is truncated: it has \d+ bytes, and \d+ were written\."),
        (lambda path: (path / "state.index").unlink(), r"state\.index is missing or unreadable: No such file"),
        (lambda path: (path / "training.json").unlink(), r"training\.json is missing or unreadable: No such file"),
        (lambda path: (path / "training.json").write_text("{"), r"training\.json cannot be read"),
        (lambda path: (path / "training.json").write_text("[" * 100_000), r"training\.json cannot be read"),
        (lambda path: (path / "training.json").write_text("[]"), r"training\.json cannot be read"),
        (lambda path: replace_by_pipe(path / "training.json"), r"training\.json is missing or unreadable: not a file"),
        (lambda path: forge(path, sizes={"state.index": 0}, pipe="state.index"), r"state\.index is not a file"),
        (lambda path: forge(path, position={"epoch": -1, "step": 2, "batches": 0}), "its position is not one of a"),
    ],
)
def test_a_damaged_checkpoint_is_refused(tmp_path: Path, damage: Callable[[Path], Any], message: str) -> None:
    newest = saved_at(tmp_path, 1, 2)
    damage(newest)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(CheckpointError, match=message) as raised:
        Checkpoint(tmp_path, model=make())
    assert str(raised.value).endswith(f"Fix: move {newest} away, and the job goes on from step-00000001")
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


def test_a_checkpoint_of_another_keras_is_refused(tmp_path: Path) -> None:
    forge(saved_at(tmp_path, 7), keras=5 - keras_release())
    with pytest.raises(CheckpointError, match=r"it is of Keras \d, and this process has Keras \d\. Fix: "):
        Checkpoint(tmp_path, model=make())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"model": lambda: make(5)},
            r"its model is another one: .*/kernel.* is float32 \[3, 2\] instead of .*\[3, 5\]",
        ),
        ({"model": lambda: make(2, "SGD")}, "its optimizer is Adam instead of SGD"),
        (
            {"model": make, "more": lambda: tf.Variable(1)},
            "it has model, optimizer, and this script saves model, more",
        ),
    ],
)
def test_a_checkpoint_of_something_else_is_refused(
    tmp_path: Path, given: dict[str, Callable[[], Any]], message: str
) -> None:
    saved_at(tmp_path, 7)
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(tmp_path, **{name: make_it() for name, make_it in given.items()})


@pytest.mark.skipif(keras_release() == 3, reason="the states of all layers of Keras 3 are saved")
def test_layers_whose_random_state_cannot_be_saved_are_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(3,)), tf.keras.layers.Dropout(0.5, name="drop")])
    Checkpoint(tmp_path, model=model)
    assert "the layers drop draw random numbers with a state that TensorFlow cannot save" in capfd.readouterr().err
