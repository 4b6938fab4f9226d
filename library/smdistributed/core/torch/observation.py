"""What the timeline is told of collectives: begin and end, when a bucket is ready, how long backward waits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch

from smdistributed.core import timeline
from smdistributed.core.torch.ordered import Ordered


class _Backward:
    """A backward pass during which collectives are asked for: buckets, which travel while it goes on."""

    def __init__(self) -> None:
        self.buckets = 0
        self.ended: int | None = None  # in the clock of the timeline; None: it goes on


_passes: WeakKeyDictionary[Ordered, _Backward] = WeakKeyDictionary()


def observed(
    name: str, collective: Callable[[], None], about: Mapping[str, Any], ordered: Ordered
) -> Callable[[], None]:
    """Return the collective so that it records itself. To be called where it is asked for."""
    backward = _this_backward(ordered)
    told = dict(about)
    if backward is not None:
        told["bucket"] = backward.buckets
        backward.buckets += 1
        running = timeline.recorder
        if running is not None:
            running.instant("communication", "bucket ready", {"bucket": told["bucket"], "bytes": told["bytes"]})

    def recorded() -> None:
        began = timeline.now()
        try:
            collective()
        finally:
            _record(name, began, told, ordered, backward)

    return recorded


def _record(name: str, began: int, about: Mapping[str, Any], ordered: Ordered, backward: _Backward | None) -> None:
    running, ended = timeline.recorder, timeline.now()
    if running is None:
        return
    running.complete("communication", name, began, ended, about)
    if not ordered.is_this_thread():
        running.complete("wait", name, began, ended)
    elif backward is not None and backward.ended is not None and ordered.is_last():
        running.complete("wait", name, min(backward.ended, ended), ended)


def _this_backward(ordered: Ordered) -> _Backward | None:
    """The backward pass that runs in this thread; None: none does."""
    found = _passes.get(ordered)
    if found is not None and found.ended is None:
        return found
    backward = _Backward()

    def end() -> None:
        backward.ended = timeline.now()

    try:
        torch.autograd.Variable._execution_engine.queue_callback(end)
    except RuntimeError:  # "can only be installed during backward pass"
        return None
    _passes[ordered] = backward
    return backward
