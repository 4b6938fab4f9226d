"""One gradient takes a short way: from torch's reducer to the compiled engine in at most six Python frames."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.library.conftest import clean_environment

SCRIPT = Path(__file__).parent / "ranks/gradient_path.py"
MOST_FRAMES = 6  # five is possible if the caller prepares the bucket, but then asynchronous collectives are slower


def test_at_most_six_frames_from_torch_to_the_engine() -> None:
    command = [sys.executable, "-W", "ignore::DeprecationWarning", str(SCRIPT)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=clean_environment())
    assert ended.returncode == 0, ended.stderr
    gradient, synchronous = (line.partition(": ")[2] for line in ended.stdout.splitlines())
    caller, thread = gradient.split(" | ")
    assert caller.split()[-1] == "run", "the collective is queued"
    assert thread.split()[-1] == "all_reduce", "the engine"
    assert len(f"{caller} {thread}".split()) <= MOST_FRAMES, gradient
    assert len(synchronous.split()) <= MOST_FRAMES, synchronous
