"""The metrics and steps in lines that programs print by default, and lines with other numbers."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from shoal.jobs.job_log import JobLog
from shoal.jobs.printed_metrics import LineReader, Reading, X

CORPUS = Path(__file__).parent / "data" / "printed_lines.txt"
LEAST = 0.95


class Printed(NamedTuple):
    """A line of the corpus, with what it has and what is found in it."""

    program: str
    text: str
    metrics: dict[str, float]
    x: X | None
    found: Reading

    @property
    def right(self) -> set[str]:
        return {name for name, value in self.metrics.items() if is_same(value, self.found.metrics.get(name, 1e99))}

    @property
    def has_right_x(self) -> bool:
        x = self.found.x
        return self.x is not None and x is not None and x.name == self.x.name and is_same(x.value, self.x.value)


def is_same(one: float, other: float) -> bool:
    return (math.isnan(one) and math.isnan(other)) or math.isclose(one, other, rel_tol=1e-3, abs_tol=1e-12)


def read_corpus() -> Iterator[Printed]:
    program, reader = "", LineReader()
    lines = [line for line in CORPUS.read_text().splitlines() if line and not line.startswith("# ")]
    for line, after in zip(lines, [*lines[1:], ""]):
        if line.startswith("## "):
            program, reader = line[3:], LineReader()
        elif not line.startswith("» "):
            metrics, _, x = after.removeprefix("» ").partition(" @ ") if after.startswith("» ") else ("", "", "")
            pairs = [pair.rpartition("=") for pair in metrics.split()]
            text, (name, _, value) = line.replace("\\t", "\t"), x.partition("=")
            expected = X(name, float(value)) if x else None
            found = {name: float(value) for name, _, value in pairs}
            yield Printed(program, text, found, expected, reader.read(text))


def read(text: str) -> dict[str, float]:
    return LineReader().read(text).metrics


def test_metrics_of_printed_lines() -> None:
    lines = [*read_corpus()]
    named = sum(len(line.metrics) for line in lines)
    found = sum(len(line.right) for line in lines)
    false = [(line.text, line.found) for line in lines if len(line.found.metrics) > len(line.right)]
    placed = [line for line in lines if line.x]
    right = sum(line.has_right_x for line in placed)
    wrong = [(line.text, line.found) for line in lines if line.found.metrics and line.found.x and not line.has_right_x]
    programs = len({line.program for line in lines})
    print(f"{len(lines)} lines of {programs} programs: {found} of {named} metrics, {len(false)} lines with a false one")
    print(f"{right} of {len(placed)} steps and epochs, {len(wrong)} wrong ones")
    assert len(lines) >= 500
    assert programs >= 50
    assert (false, wrong) == ([], [])
    assert found / named >= LEAST
    assert right / len(placed) >= LEAST


@pytest.mark.parametrize(
    "line",
    [
        "loss=nan",
        "epoch 3 loss NaN 7763 images/s",
        "45/45 - 1s - accuracy: 0.1875 - loss: nan",
        "{'loss': nan, 'epoch': 1.0}",
        "{'loss': 'nan', 'learning_rate': '1e-3'}",
        "step 10 | loss inf | lr 3e-4",
        "train loss: -inf",
        "Loss: Infinity",
        "loss=1e999",
    ],
)
def test_a_value_that_is_not_finite(line: str) -> None:
    found = [value for name, value in read(line).items() if name.lower().endswith("loss")]
    assert len(found) == 1
    assert not math.isfinite(found[0])


@pytest.mark.parametrize("line", ["x=nan", "loss information", "loss: infra", "loss: nano", "big=1e999"])
def test_other_texts_are_not_numbers(line: str) -> None:
    assert read(line) == {}


def test_the_last_value_counts() -> None:
    log = JobLog()
    for rank, line in ((None, "loss: nan"), (None, "loss: 0.5 acc: nan"), (1, "loss: 1"), (1, "loss inf")):
        log.add("algo-1", line, rank=rank)
    assert {key[0::2]: str(value) for key, value in log.not_finite.items()} == {
        ("acc", None): "nan",
        ("loss", 1): "inf",
    }


def test_a_curve_has_steps_and_marks() -> None:
    log = JobLog()
    log.add("a", "step 1 loss 1", rank=1)
    for line in ("step 1 loss 2", "step 2 loss nan", "step 3 loss 1", "step 4 loss -inf"):
        log.add("a", line)
    series = log.series["loss", "a", None]
    assert ([*series.values], [*series.xs], series.x_name) == ([2, 1], [1, 3], "step")
    assert [mark[1:] for mark in series.marks] == [(2, "nan"), (4, "-inf")]
    assert log.steps == {("step", "a", None): 4, ("step", "a", 1): 1}


@pytest.mark.parametrize("line", ["loss 0.5", "step 2 loss 0.5", "epoch 9 loss 0.5", "step 2 loss nan"])
def test_steps_that_do_not_grow_are_dropped(line: str) -> None:
    log = JobLog()
    for text in ("step 3 loss 2", "step 4 loss nan", line, "step 5 loss 1"):
        log.add("a", text)
    series = log.series["loss", "a", None]
    assert (series.x_name, [*series.xs], {mark.x for mark in series.marks}) == ("", [], {None})
    assert len(series.times) == len(series.values) == 4 - len(series.marks)


def test_a_bar_that_is_drawn_again_adds_no_value() -> None:
    """Lightning draws a bar with the last value before it has the new one, and an empty one after an epoch."""
    log = JobLog()
    for epoch, done, loss in ((0, 1, 9), (0, 2, 9), (0, 2, 8), (0, 0, 8), (1, 0, 8), (1, 1, 8), (1, 1, 7)):
        log.add("a", f"Epoch {epoch}:  50%|█████     | {done}/2 [00:00<00:00, 44.35it/s, v_num=0, loss={loss}]")
    series = log.series["loss", "a", None]
    assert (series.x_name, [*series.xs], [*series.values]) == ("epoch", [0.5, 1, 1.5], [9, 8, 7])


def test_a_long_curve_keeps_its_steps() -> None:
    log = JobLog()
    for step in range(5000):
        log.add("a", f"step {step} loss {step}.5")
    series = log.series["loss", "a", None]
    assert len(series.xs) == len(series.values) < 1000
    assert all(value == x + 0.5 for x, value in zip(series.xs, series.values))


PIECES = ("loss ", "loss: ", "train ", "loss1", "loss 1 ", "'loss' ", "loss@", "1", "a=1,", "a=1] ", "A", "| a ", " ")
MORE = (
    "epoch ",
    "[1/2] ",
    "test ",
    "a=1 - ",
    "Train: ",
    "a\t",
    "1/2 ",
    "(1%) ",
    "Linear(",
    "loss'",
    "nan ",
    "step",
    "_",
)


@pytest.mark.parametrize("piece", PIECES + MORE)
def test_long_lines_take_no_time(piece: str) -> None:
    began = time.monotonic()
    reader = LineReader()
    reader.read("epoch  train_loss  time")
    for _ in range(20):
        reader.read(f"loss {piece * (4000 // len(piece))}!")
    assert time.monotonic() - began < 2
