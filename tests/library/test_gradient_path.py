"""One gradient takes a short way: from torch's reducer to the compiled engine in at most six Python frames."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.library.conftest import Alone

SCRIPT = Path(__file__).parent / "ranks/gradient_path.py"
MOST_FRAMES = 6  # five is possible if the caller prepares the bucket, but then asynchronous collectives are slower


def test_at_most_six_frames_from_torch_to_the_engine(alone: Alone) -> None:
    gradient, synchronous = (line.partition(": ")[2] for line in alone(SCRIPT).splitlines())
    caller, thread = gradient.split(" | ")
    assert caller.split()[-1] == "run", "the collective is queued"
    assert thread.split()[-1] == "all_reduce", "the engine"
    assert len(f"{caller} {thread}".split()) <= MOST_FRAMES, gradient
    assert len(synchronous.split()) <= MOST_FRAMES, synchronous
