"""torch's own backends, gloo and NCCL, with the methods that torch calls on a process group.

It adds collectives of several tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Work

_Tensors = Sequence[torch.Tensor]


class NativeBackend:
    """A backend that is written in C++. It takes one tensor at a time; this adds collectives of several tensors."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)

    def allreduce(self, tensors: _Tensors, opts: Any) -> Any:
        """Reduces each tensor. NCCL takes one at a time, and gloo would add up the tensors of one rank."""
        options = dist.AllreduceOptions()
        options.reduceOp = opts.reduceOp  # a coalesced call has options of another type
        return _join([self.backend.allreduce([tensor], options) for tensor in tensors])

    def allgather_into_tensor_coalesced(self, outputs: _Tensors, inputs: _Tensors) -> Any:
        return _join([self.backend._allgather_base(*pair) for pair in zip(outputs, inputs)])

    def reduce_scatter_tensor_coalesced(self, outputs: _Tensors, inputs: _Tensors, opts: Any) -> Any:
        return _join([self.backend._reduce_scatter_base(*pair, opts) for pair in zip(outputs, inputs)])


def _join(works: Sequence[Any]) -> Any:
    return works[0] if len(works) == 1 else _JoinedWork(works)


class _JoinedWork(Work):
    def __init__(self, works: Sequence[Any]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Waits for one after the other, each with this timeout. An error is raised without waiting for the others."""
        for work in self._works:
            work.wait(timeout) if timeout else work.wait()
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def get_future(self) -> Any:
        futures = torch.futures.collect_all([work.get_future() for work in self._works])
        return futures.then(lambda ended: [tensor for future in ended.value() for tensor in future.value()])
