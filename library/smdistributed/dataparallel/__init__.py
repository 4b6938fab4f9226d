"""Data parallel training: each rank trains a copy of the model on its share of the data; gradients are averaged.

Here are AWS's functions that record a timeline. Collectives are in packages named after a framework, such as
`smdistributed.dataparallel.torch`; only those import a framework.
"""

from __future__ import annotations

import os

from smdistributed.core import timeline as _timeline
from smdistributed.core.exceptions import SMDDPError
from smdistributed.core.launch import LaunchError as _LaunchError
from smdistributed.core.launch import read_launch as _read_launch

_FILE = "smdataparallel_timeline.json"


def start_profiler(path: str | os.PathLike[str], append_rank: bool = False) -> None:
    """Starts recording this rank's computation and communication as a Chrome trace (AWS API 1.x).

    `shoal timeline` reads the file. Recording ends with `stop_profiler` or with the process. Call it on every
    rank, before or after initialization.

    Args:
        path: A directory for `smdataparallel_timeline.json`, or a file name that ends in `.json`. Directories are
            created, and an existing file is replaced.
        append_rank: Whether to put the rank into the file's name (`smdataparallel_timeline_3.json`). AWS does not
            document ranks that share a file system without it. Here rank 0 writes the plain name, and every other rank
            appends its own.

    Raises:
        SMDDPError: If a recording runs already (undocumented by AWS), or the file cannot be written.
        LaunchError: If the environment does not say which rank this is.
    """
    launch = _read_launch()
    rank, size = launch.rank, launch.world_size
    try:
        _timeline.start(path, rank, size, default_name=_FILE, append_rank=append_rank, job=launch.job)
    except _timeline.TimelineError as error:
        raise SMDDPError(str(error)) from error


def _start_requested_profiler(rank: int, world_size: int) -> None:
    """Starts recording if SMDDP_TIMELINE says where. Raises SMDDPError if the file cannot be written."""
    if not os.environ.get("SMDDP_TIMELINE"):
        return
    try:
        job = _read_launch().job
    except _LaunchError:  # torch needs no local rank
        job = ""
    try:
        _timeline.start_if_requested("SMDDP_TIMELINE", rank, world_size, default_name=_FILE, job=job)
    except _timeline.TimelineError as error:
        raise SMDDPError(f"SMDDP_TIMELINE: {error}") from error


def stop_profiler() -> None:
    """Ends the recording and completes its file.

    Raises:
        SMDDPError: If none runs.
    """
    try:
        _timeline.stop()
    except _timeline.TimelineError as error:
        raise SMDDPError(str(error)) from error
