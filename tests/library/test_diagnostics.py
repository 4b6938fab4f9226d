"""Stalls are reported once, and messages name the collectives that ranks call."""

from __future__ import annotations

import threading

import pytest

from smdistributed.core import diagnostics
from smdistributed.core.diagnostics import CollectiveError, StallDetector


def test_a_stall_is_reported_once_until_its_identifier_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMDDP_STALL_SECONDS", "2.5")
    detector = StallDetector()
    waits = [("a", 2.5), ("a", 2.6), ("a", 9), ("b", 9)]
    assert [detector.is_new_stall(*wait) for wait in waits] == [False, True, False, True]
    detector.reset()
    assert detector.is_new_stall("a", 3)


@pytest.mark.parametrize(("text", "seconds"), [(None, 60), ("", 60), ("0.5", 0.5), ("1e3", 1000)])
def test_seconds_until_a_wait_is_a_stall(monkeypatch: pytest.MonkeyPatch, text: str | None, seconds: float) -> None:
    monkeypatch.delenv("SMDDP_STALL_SECONDS", raising=False)
    if text is not None:
        monkeypatch.setenv("SMDDP_STALL_SECONDS", text)
    assert StallDetector().seconds == seconds


@pytest.mark.parametrize("text", ["0", "-1", "nan", "soon"])
def test_seconds_that_are_no_number_above_0_are_an_error(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("SMDDP_STALL_SECONDS", text)
    expected = rf"^SMDDP_STALL_SECONDS='{text}' is invalid\. Allowed: a number of seconds above 0"
    with pytest.raises(CollectiveError, match=expected):
        StallDetector()


@pytest.mark.parametrize(
    ("collective", "text"),
    [
        ((0, "", "", "", -1, 0), "no collective yet"),
        ((1, "barrier", "float32", "sum", -1, 0), "barrier (collective 1 of the group)"),
        ((2, "all_reduce", "float32", "avg", -1, 4096), "all_reduce of float32 with avg, 4,096 bytes (collective 2 of"),
        ((3, "reduce", "int64", "max", 0, 8), "reduce of int64 with max with root 0, 8 bytes (collective 3 of"),
        ((4, "gather", "int64", "max", 1, 8), "gather with root 1, 8 bytes (collective 4 of"),
        ((5, "scatter", "int64", "max", 0, 8), "scatter with root 0, 8 bytes (collective 5 of"),
        ((6, "all_gather", "int64", "max", -1, 8), "all_gather, 8 bytes (collective 6 of"),
    ],
)
def test_a_collective_is_described(collective: tuple[int, str, str, str, int, int], text: str) -> None:
    assert diagnostics.describe_collective(*collective).startswith(text)


def test_ranks_that_differ_are_named() -> None:
    assert diagnostics.collective_mismatch(0, "x", 3, "y").endswith("rank 0 calls x, rank 3 calls y.")
    earlier = diagnostics.collective_mismatch(0, "x", 3, "x")
    assert "before this one: rank 0 and rank 3 both call x, but an earlier one differed. Fix: " in earlier
    assert diagnostics.peer_aborted(1, "x", "no memory").endswith("rank 1 was in x. It reports: no memory")
    assert (
        diagnostics.describe_laggard(2, "x", None) == "\nRank 2 last called x. It does not answer: it may be stopped."
    )


def test_the_stack_of_the_main_thread_ends_with_its_innermost_call(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = diagnostics.main_thread_stack().splitlines()
    assert "in main_thread_stack" in lines[-2] and sum(line.startswith("  File") for line in lines) == 8
    ended = threading.Thread()
    monkeypatch.setattr(threading, "main_thread", lambda: ended)
    assert diagnostics.main_thread_stack() == "  (it has ended)"
