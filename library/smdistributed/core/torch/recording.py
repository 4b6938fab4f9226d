"""Records collectives in the timeline: their begin and end, when a bucket is ready, and how long backward waits.

torch reports the collectives of its own NCCL. While a timeline is recorded, and for groups that were in one, it uses
two timed CUDA events for each collective. A thread of its own calls the hook when the collective has ended. Nothing is
added to the collective itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist

from smdistributed.core import timeline
from smdistributed.core.torch.collective_queue import CollectiveQueue

_NCCL_NAMES = {
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

_log = logging.getLogger(__name__)


class _Backward:
    """A backward pass that calls collectives, for buckets that travel while it continues."""

    def __init__(self) -> None:
        self.buckets = 0
        self.ended: int | None = None  # by the timeline's clock; None: it runs


_passes: WeakKeyDictionary[CollectiveQueue, _Backward] = WeakKeyDictionary()
_recorded_nccl: WeakSet[Any] = WeakSet()


def record_collective(
    name: str, collective: Callable[[], object], about: Mapping[str, Any], queue: CollectiveQueue
) -> Callable[[], None]:
    """Returns the collective so that it records itself, with the wait for it. Call it when the collective is called.

    In a backward pass it is a bucket: it gets a number, and that it is ready is recorded now. `name` and `about` are
    the span's: see `timeline`. `queue` runs the collective.
    """
    backward = _current_backward(queue)
    args = dict(about)
    if backward is not None:
        args["bucket"] = backward.buckets
        backward.buckets += 1
        running = timeline.recorder
        if running is not None:
            running.instant("communication", "bucket ready", {"bucket": args["bucket"], "bytes": args["bytes"]})

    def recorded() -> None:
        began = timeline.now()
        try:
            collective()
        finally:
            _record(name, began, args, queue, backward)

    return recorded


def _record(name: str, began: int, args: Mapping[str, Any], queue: CollectiveQueue, backward: _Backward | None) -> None:
    """Records an ended collective and the wait for it: the call's own, or the end of backward's."""
    running, ended = timeline.recorder, timeline.now()
    if running is None:
        return
    running.complete("communication", name, began, ended, args)
    if not queue.is_this_thread():
        running.complete("wait", name, began, ended)
    elif backward is not None and backward.ended is not None and queue.is_last():
        running.complete("wait", name, min(backward.ended, ended), ended)


def _current_backward(queue: CollectiveQueue) -> _Backward | None:
    """Returns the record of the backward pass that runs in this thread, and begins one if needed; None if none runs."""
    found = _passes.get(queue)
    if found is not None and found.ended is None:
        return found
    backward = _Backward()

    def end() -> None:
        backward.ended = timeline.now()

    try:
        torch.autograd.Variable._execution_engine.queue_callback(end)
    except RuntimeError:  # "can only be installed during backward pass"
        return None
    _passes[queue] = backward
    return backward


def record_nccl(group: Any) -> None:
    """Records a torch group's NCCL collectives. torch demands that its process calls `destroy_process_group`."""
    if group not in _recorded_nccl:  # torch accepts one hook
        _recorded_nccl.add(group)
        timeline.when_started(group, _install_nccl_hook)


def _install_nccl_hook(group: Any) -> None:
    """Lets torch time a group's collectives and report their ends. If it cannot, logs a warning."""
    try:
        group._enable_collectives_timing()
        # torch asks how long each collective took that ends with a hook, and ends the process if one was not timed.
        group._wait_for_pending_works()
        group._register_on_completion_hook(_nccl_hook("" if group is dist.group.WORLD else group.group_name))
    except RuntimeError as error:
        _log.warning("smddp: the timeline lacks the collectives of NCCL: %s", error)


def _nccl_hook(group: str) -> Callable[[Any], None]:
    def record(ended: Any) -> None:
        """Called by torch in a thread of its own; an error there would end the process."""
        running = timeline.recorder
        if running is None:
            return
        try:
            _record_nccl(running, ended, group)
        except Exception as error:
            _log.warning("smddp: the timeline lacks a collective of NCCL: %s", error)

    return record


def _record_nccl(running: timeline.Recorder, ended: Any, group: str) -> None:
    name = _NCCL_NAMES.get(ended.op_type.name, ended.op_type.name.strip("_").lower())
    finished, took = (int(time.total_seconds() * 1e9) for time in (ended.time_finished, ended.active_duration))
    about = {"operation": name, "engine": "nccl", **({"group": group} if group else {})}
    running.complete("communication", name, finished - took, finished, about)
