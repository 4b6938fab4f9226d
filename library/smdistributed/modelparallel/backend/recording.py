"""The timeline of a job: `SMP_TIMELINE` names a directory, or a file that ends in `.json`, where every rank writes what
`shoal report timeline` merges into one page."""

from __future__ import annotations

import os

from smdistributed.core import timeline

VARIABLE = "SMP_TIMELINE"
_FILE = "smp_timeline.json"


def start_timeline(rank: int, world_size: int) -> None:
    """Begin to record, if the environment asks for it. Raises TimelineError when the file cannot be written."""
    path = os.environ.get(VARIABLE)
    if path:
        timeline.start(path, rank, world_size, default_name=_FILE)
