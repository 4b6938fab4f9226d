"""Collectives of torch's own NCCL in the timeline: torch tells of each that has ended, in a thread of its own.

Nothing is added to the way of a collective. While a timeline is recorded, and for groups that have been in one, torch
takes two timed CUDA events for each collective, and that thread calls `_record` when it has ended.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch.distributed as dist

from smdistributed.core import timeline

_NAMES = {
    "ALLREDUCE": "all_reduce",
    "ALLREDUCE_COALESCED": "all_reduce",
    "ALLGATHER": "all_gather",
    "ALLGATHER_COALESCED": "all_gather",
    "_ALLGATHER_BASE": "all_gather_into_tensor",
    "REDUCE_SCATTER": "reduce_scatter",
    "_REDUCE_SCATTER_BASE": "reduce_scatter",
    "ALLTOALL": "all_to_all",
    "ALLTOALL_BASE": "all_to_all_single",
}

_known: WeakSet[Any] = WeakSet()
_log = logging.getLogger(__name__)


def record_nccl(group: Any) -> None:
    """Record the collectives of this group of torch's own, whose default backend is NCCL, while a timeline runs.

    As torch says of its hooks, such a process has to call `destroy_process_group` before it ends.
    """
    if group not in _known:  # torch takes one hook
        _known.add(group)
        timeline.when_started(group, _begin)


def _begin(group: Any) -> None:
    try:
        group._enable_collectives_timing()
        group._register_on_completion_hook(_recording("" if group is dist.group.WORLD else group.group_name))
    except RuntimeError as error:
        _log.warning("smddp: the timeline is without the collectives of NCCL: %s", error)


def _recording(group: str) -> Callable[[Any], None]:
    def record(ended: Any) -> None:
        """Called by torch, in a thread of its own, in which an error would end the process."""
        running = timeline.recorder
        if running is None:
            return
        try:
            _record(running, ended, group)
        except Exception as error:
            _log.warning("smddp: a collective of NCCL is missing in the timeline: %s", error)

    return record


def _record(running: timeline.Recorder, ended: Any, group: str) -> None:
    """Record the time that the device took, up to when torch saw the end; its clock is that of `timeline.now`."""
    name = _NAMES.get(ended.op_type.name, ended.op_type.name.strip("_").lower())
    finished, took = (int(time.total_seconds() * 1e9) for time in (ended.time_finished, ended.active_duration))
    about = {"operation": name, "engine": "nccl", **({"group": group} if group else {})}
    running.complete("communication", name, finished - took, finished, about)
