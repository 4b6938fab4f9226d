"""Data parallel training: every rank trains a copy of the model on its share of the data, and gradients are averaged.

Frameworks are imported by the packages named after them (`smdistributed.dataparallel.torch`), never here.
"""

from __future__ import annotations

import os

from smdistributed.core import timeline as _timeline
from smdistributed.core.launch import read_launch as _read_launch
from smdistributed.dataparallel.exceptions import SMDDPError

_FILE = "smdataparallel_timeline.json"


def start_profiler(path: str | os.PathLike[str], append_rank: bool = False) -> None:
    """Begin to record what this rank does when, as a Chrome trace (AWS API 1.x); `shoal report timeline` reads it.

    path: a directory, for `smdataparallel_timeline.json`, or a file whose name ends in `.json`. Directories are made,
        and a file that is there is replaced.
    append_rank: put the rank into the file's name (`smdataparallel_timeline_3.json`). AWS does not say what happens to
        ranks that share a file system without it: here rank 0 writes the plain name, and every other rank puts its own
        into it.

    Recording ends with `stop_profiler`, or with the process. Call it on every rank, before or after initialisation.

    Raises SMDDPError when a recording runs already (AWS does not say) and when the file cannot be written, LaunchError
    when the environment does not say which rank this is.
    """
    launch = _read_launch()
    job = launch.session_dir or (f"{launch.master.host}:{launch.master.port}" if launch.master else "")
    try:
        _timeline.start(path, launch.rank, launch.world_size, default_name=_FILE, append_rank=append_rank, job=str(job))
    except _timeline.TimelineError as error:
        raise SMDDPError(str(error)) from error


def stop_profiler() -> None:
    """End the recording and complete its file. Raises SMDDPError when none runs."""
    try:
        _timeline.stop()
    except _timeline.TimelineError as error:
        raise SMDDPError(str(error)) from error
