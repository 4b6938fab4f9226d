"""The text of the failure file."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from shoal_toolkit import verdict
from shoal_toolkit.contract import Paths
from shoal_toolkit.errors import LaunchError
from shoal_toolkit.verdict import Failure, Verdict

TRACEBACK = """some output
Traceback (most recent call last):
  File "a.py", line 1, in <module>
KeyError: 'first'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "a.py", line 3, in <module>
    raise ValueError("boom")
ValueError: boom
and a second line
"""


def text(stderr: str, code: int = 1) -> str:
    return verdict.of_failure(
        Failure(code, "rank 1 on algo-2", ["python", "a.py", "--api_key", "hunter2"], stderr)
    ).message


def test_the_exception_then_who_then_the_traceback() -> None:
    lines = text(TRACEBACK).splitlines()
    assert lines[0] == "ValueError: boom"
    assert lines[1] == "rank 1 on algo-2 exited with code 1: python a.py --api_key ******"
    assert lines[-2:] == ["ValueError: boom", "and a second line"]


def test_output_after_the_traceback_does_not_hide_it() -> None:
    assert text(TRACEBACK + "\n".join(f"[W] warning {n}" for n in range(50))).startswith("ValueError: boom\n")


def test_without_a_traceback_the_last_line_speaks() -> None:
    assert text("one\n\nerror: no such file\n\n").startswith("error: no such file\nrank 1")


@pytest.mark.parametrize("words", ["mpirun has exited due to it", "é"])
def test_a_rule_of_dashes_says_nothing(words: str) -> None:
    assert text(f"{'-' * 70}\n{words}\n{'-' * 70}\n").startswith(f"{words}\nrank 1")


def test_an_exception_group_is_named() -> None:
    """Python 3.11 draws a frame around it."""
    framed = (
        "  + Exception Group Traceback (most recent call last):\n"
        '  |   File "a.py", line 1, in <module>\n'
        "  | ExceptionGroup: two (1 sub-exception)\n"
        "  +-+---------------- 1 ----------------\n"
        "    | ValueError: boom\n"
        "    +------------------------------------\n"
    )
    assert "ValueError: boom" in text(framed).splitlines()[0]


def test_nothing_was_written() -> None:
    assert text("", 42).startswith("The script exited with code 42, and wrote nothing to stderr.")


def test_what_sagemaker_shows_holds_it_all() -> None:
    long = (
        "Traceback (most recent call last):\n" + '  File "x.py", line 1, in f\n' * 500 + "RuntimeError: " + "x" * 5000
    )
    message = text(long)
    assert len(message) <= 1024
    assert message.startswith("RuntimeError: xxx")
    assert "rank 1 on algo-2" in message


@pytest.mark.parametrize(
    ("code", "words"),
    [(137, "was killed by signal 9 (SIGKILL)"), (139, "was killed by signal 11 (SIGSEGV)"), (3, "exited with code 3")],
)
def test_signals_are_named(code: int, words: str) -> None:
    assert verdict.exit_description(code) == words


def test_a_stop_is_called_one() -> None:
    stopped = verdict.of_stop(signal.SIGTERM)
    assert stopped.exit_code == 143
    assert "was stopped" in stopped.message


def test_an_earlier_verdict_is_removed_and_only_one_is_written(tmp_path: Path) -> None:
    """The stock toolkit keeps a stale failure file beside the success."""
    paths = Paths(str(tmp_path))
    verdict.conclude(paths, Verdict(3, "bad"), {})
    verdict.begin(paths, {})
    assert verdict.conclude(paths, Verdict(0), {}) == 0
    assert sorted(path.name for path in (tmp_path / "output").iterdir()) == ["data", "job.json", "success"]
    assert (tmp_path / "model").is_dir()


def test_a_job_that_ends_before_it_begins_leaves_no_other_verdict(tmp_path: Path) -> None:
    paths = Paths(str(tmp_path))
    verdict.conclude(paths, Verdict(0), {})
    assert verdict.conclude(paths, Verdict(3, "bad"), {}) == 3
    assert sorted(path.name for path in (tmp_path / "output").iterdir()) == ["failure", "job.json"]


def test_a_success_that_cannot_be_written_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "output").write_text("a file is in the way")
    paths = Paths(str(tmp_path))
    with pytest.raises(LaunchError, match="Mount a writable directory"):
        verdict.begin(paths, {})
    assert verdict.conclude(paths, Verdict(0), {}) == 1
    assert verdict.conclude(paths, Verdict(42, "x"), {}) == 42
