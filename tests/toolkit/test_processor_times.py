"""benchmarks/processor_times.py, which says what each program of a job with many hosts costs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from processor_times import Ended, listen, sum_by_program

BUSY = "import time\nwhile time.process_time() < 0.1: pass"


def test_programs_count_for_the_root_that_they_descend_from() -> None:
    ended = [
        Ended("rank", 13, 12, 1.0),  # before its parent
        Ended("sh", 12, 11, 0.25),
        Ended("train", 11, 10, 2.0),
        Ended("train", 14, 10, 3.0),  # a thread, or a second one
        Ended("train", 21, 20, 5.0),
        Ended("other", 30, 1, 7.0),
    ]
    sums = sum_by_program(ended, {10: "first", 21: "second"})
    assert sums == {
        ("first", "rank"): 1.0,
        ("first", "sh"): 0.25,
        ("first", "train"): 5.0,
        ("second", "train"): 5.0,
    }


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gets such reports")
def test_a_program_that_has_ended_is_reported_with_its_time() -> None:
    try:
        with listen() as reports:
            shell = subprocess.Popen(["sh", "-c", '"$0" -I -S -c "$1"; :', sys.executable, BUSY])
            shell.wait(60)
            found = sum_by_program(reports.read(), {shell.pid: "shell"})
    except OSError as error:
        pytest.skip(str(error))  # a kernel without CONFIG_TASKSTATS
    (python,) = (seconds for (_, name), seconds in found.items() if name.startswith("python"))
    assert 0.1 <= python < 1
    assert ("shell", "sh") in found
