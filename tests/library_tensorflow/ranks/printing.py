"""A line that a rank prints for its test: one of its own, with the engine."""

from __future__ import annotations

import sys

from smdistributed.dataparallel.tensorflow import job


def print_line(*words: object) -> None:
    """One write: mpirun mixes what several make of it."""
    sys.stdout.write(f"{' '.join(map(str, words))} [{job.engine()}]\n")
    sys.stdout.flush()
