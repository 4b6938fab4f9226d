"""`model.join()`: replicas that have fewer batches than others, by torch's Join."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from smdistributed.core.torch.devices import device_of
from smdistributed.modelparallel.backend.exceptions import SMPUnsupportedError
from smdistributed.modelparallel.torch.script.buckets import broadcast_in_buckets
from smdistributed.modelparallel.torch.script.gradients import Reducer
from smdistributed.modelparallel.torch.script.state import TorchState

_EXCLUSIVE = {
    "pipeline_parallel_degree": 1,
    "tensor_parallel_degree": 1,
    "sharded_data_parallel_degree": 1,
    "shard_optimizer_state": False,
    "fp16": False,
}
"""With other values, ranks meet in more places than in averages of gradients."""


class UnevenInputs(Joinable, JoinHook):
    """The part of a rank in `with model.join()`: in its steps, and in steps for which it has no batch."""

    def __init__(self, state: TorchState, reducer: Reducer, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self._rank, self._group = state.rank, state.process_group("DP_GROUP")
        self._reducer, self._tensors = reducer, tensors

    def join_hook(self, **_: Any) -> JoinHook:
        """Called by torch's Join."""
        return self

    @property
    def join_device(self) -> torch.device:
        """The device of the messages of torch's Join."""
        return device_of(self._group)

    @property
    def join_process_group(self) -> Any:
        """The replicas."""
        return self._group

    def notify(self) -> None:
        """Tells ranks without batches that a step averages now. Raises RuntimeError if one of them has ended early."""
        Join.notify_join_context(self)

    def main_hook(self) -> None:
        """Takes part in the averages of a step, with gradients of 0."""
        self._reducer.forget_gradients()
        self._reducer.begin()
        self._reducer.end()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Takes parameters and buffers from a rank that trained to the end."""
        last = torch.tensor([self._rank if is_last_joiner else -1], device=self.join_device)
        dist.all_reduce(last, op=dist.ReduceOp.MAX, group=self._group)
        broadcast_in_buckets(self._tensors, self._group, int(last.item()))


def require_joinable(state: TorchState) -> None:
    """Raises SMPUnsupportedError if ranks of the job meet elsewhere than in averages of gradients."""
    for name, neutral in _EXCLUSIVE.items():
        if getattr(state.cfg, name) != neutral:
            raise SMPUnsupportedError(
                f"model.join() is called, and {name!r} is {getattr(state.cfg, name)!r}. Fix: set it to {neutral!r}; or "
                "give the loader's sampler drop_last=True, and leave model.join() out."
            )


@contextmanager
def join(inputs: UnevenInputs, reducer: Reducer, throw: bool) -> Iterator[None]:
    """Runs torch's Join. Inside, averages are not overlapped with backward."""
    overlap, reducer.overlap = reducer.overlap, False
    try:
        with Join([inputs], throw_on_early_termination=throw):
            yield
    finally:
        reducer.overlap = overlap
