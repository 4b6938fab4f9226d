"""A run of the stock toolkit is recorded, and found by its image and job, until a test fails."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path

import pytest

from . import recordings
from .lab import HostRun, Run
from .layout import Tree
from .recordings import Recordings

RUN: Run = {"algo-1": HostRun(0, 1.5, "said", "at said", {"model/a": b"\0"}, [])}


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Recordings:
    """With one run, of the job "one" in the image "oracle:1"."""
    monkeypatch.setattr(recordings, "DIRECTORY", tmp_path)
    monkeypatch.setattr(recordings, "_AGAIN", False)
    ended: Future[Run] = Future()
    ended.set_result(RUN)
    made = Recordings()
    made.will_be("oracle:1", Tree("one"), ended)
    made.will_be("oracle:1", Tree("two"), Future())  # it has not ended
    made.keep()
    return made


def test_a_run_is_found_by_its_image_and_job(recorded: Recordings) -> None:
    found = recorded.find("oracle:1", Tree("one"))
    assert found is not None
    assert found.result() == RUN
    assert recorded.find("oracle:2", Tree("one")) is None
    assert recorded.find("oracle:1", Tree("one", {"lr": "1"})) is None
    assert recorded.find("oracle:1", Tree("two")) is None


def test_all_are_forgotten(recorded: Recordings) -> None:
    recorded.forget()
    assert recorded.find("oracle:1", Tree("one")) is None


def test_all_run_again_if_asked(recorded: Recordings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recordings, "_AGAIN", True)
    assert recorded.find("oracle:1", Tree("one")) is None
