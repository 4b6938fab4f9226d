"""Lets the ranks of a training agree on the checkpoint that they load, and the step after which they stop.

Without a process group, this process is the only rank.
"""

from __future__ import annotations

import os
from typing import Any, Callable, TypeVar

import torch
import torch.distributed as dist

from shoal_toolkit.checkpoint import restart, seconds_left
from shoal_toolkit.checkpoint.directories import CheckpointError

T = TypeVar("T")


def _joined() -> bool:
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    """Return the rank of this process."""
    return dist.get_rank() if _joined() else 0


def world_size() -> int:
    """Return the number of ranks."""
    return dist.get_world_size() if _joined() else 1


def gather(value: T) -> list[T]:
    """Return the values of all ranks, in the order of ranks. A collective call."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def from_first_rank(function: Callable[[], T]) -> T:
    """Return on each rank what a function returns on rank 0. A collective call.

    Raises:
        CheckpointError: On all ranks, if the function raises one on rank 0.
    """
    if world_size() == 1:
        return function()
    answer: list[Any] = [None, None]
    if rank() == 0:
        try:
            answer = [function(), None]
        except CheckpointError as error:
            answer = [None, str(error)]
    dist.broadcast_object_list(answer)
    if answer[1] is not None:
        raise CheckpointError(answer[1])
    result: T = answer[0]
    return result


def broadcast_tensors(tensors: dict[str, torch.Tensor] | None) -> dict[str, torch.Tensor]:
    """Return the tensors of rank 0 on each rank, on the CPU. A collective call. The others give None."""
    if world_size() == 1:
        return tensors or {}
    layout = from_first_rank(lambda: [(name, t.shape, t.dtype) for name, t in (tensors or {}).items()])
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    received = {}
    for name, shape, dtype in layout:
        tensor = tensors[name].to(device) if tensors else torch.empty(shape, dtype=dtype, device=device)
        if tensor.numel():
            dist.broadcast(tensor.reshape(-1).view(torch.uint8), src=0)
        received[name] = tensor.cpu()
    return received


class StopAgreement:
    """Finds the step after which all ranks stop, once SIGTERM has reached them all.

    Before that it costs nothing. Rank 0 chooses the step after the one that it has just ended. Others cannot be beyond
    it, because each step exchanges gradients with rank 0.
    """

    def __init__(self) -> None:
        self._noted = False
        self._chosen: int | None = None
        attempt = f"{restart().number}-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        self._keys = [f"shoal-checkpoint/{attempt}/{name}" for name in ("stopped-ranks", "last-step")]

    def is_last(self, step: int) -> bool:
        """Return whether the training must stop after this step, which has just ended.

        The first call installs `seconds_left`'s handler of SIGTERM. Call it on all ranks, after each step.

        Args:
            step: The number of steps so far, the same on all ranks.
        """
        if seconds_left() is None:
            return False
        if world_size() == 1:
            return True
        if self._chosen is None:
            self._choose(step)
        return self._chosen is not None and step >= self._chosen

    def _choose(self, step: int) -> None:
        count_key, step_key = self._keys
        store = dist.distributed_c10d._get_default_store()
        count = store.add(count_key, 0 if self._noted else 1)
        self._noted = True
        if rank() == 0 and count == world_size():
            self._chosen = step + 1
            store.add(step_key, self._chosen)
        elif rank() != 0:
            self._chosen = store.add(step_key, 0) or None
