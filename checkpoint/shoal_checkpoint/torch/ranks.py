"""Lets the ranks of a training agree on the checkpoint that they load, and the step after which they stop.

Without a process group, this process is the only rank.
"""

from __future__ import annotations

import hmac
import os
import pickle
from typing import Any, Callable, TypeVar, cast

import torch
import torch.distributed as dist

from shoal_checkpoint import restart, seconds_left
from shoal_checkpoint.directories import CheckpointError

T = TypeVar("T")


def _joined() -> bool:
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    return dist.get_rank() if _joined() else 0


def world_size() -> int:
    return dist.get_world_size() if _joined() else 1


def gather(value: T) -> list[T]:
    """Gathers values in rank order. Raises CheckpointError, without unpickling, if a rank of another job sent one."""
    if world_size() == 1:
        return [value]
    return [_unpack(data) for data in _gather_bytes(_pack(value))]


def from_first_rank(function: Callable[[], T]) -> T:
    """Returns rank 0's result of a function on each rank. A CheckpointError there is raised on all ranks."""
    if world_size() == 1:
        return function()
    answer: tuple[Any, str | None] = (None, None)
    if rank() == 0:
        try:
            answer = (function(), None)
        except CheckpointError as error:
            answer = (None, str(error))
    result, problem = _unpack(_gather_bytes(_pack(answer) if rank() == 0 else b"")[0])
    if problem is not None:
        raise CheckpointError(problem)
    return cast(T, result)


# A pickle can run code. torch's collectives of objects unpickle the messages of anybody in the group.


def _tag(pickled: bytes) -> bytes:
    """Returns a tag that only a rank of this job can compute; nothing if the job has no secret."""
    secret = os.environ.get("SMDDP_JOB_SECRET")
    return hmac.digest(secret.encode(), b"checkpoint " + pickled, "sha256") if secret else b""


def _pack(value: object) -> bytes:
    pickled = pickle.dumps(value)
    return _tag(pickled) + pickled


def _unpack(data: bytes) -> Any:
    """Returns a value that a rank has packed. Raises CheckpointError, before it unpickles, if the tag is wrong."""
    size = len(_tag(b""))
    tag, pickled = data[:size], data[size:]
    if not hmac.compare_digest(tag, _tag(pickled)):
        raise CheckpointError(
            "a message about checkpoints was changed on its way, or another SMDDP_JOB_SECRET made its tag. Fix: set the"
            " same secret on all ranks, and keep strangers off the network"
        )
    return pickle.loads(pickled)


def _gather_bytes(data: bytes) -> list[bytes]:
    device = _device()
    size = torch.tensor([len(data)], device=device)
    sizes = [torch.zeros_like(size) for _ in range(world_size())]
    dist.all_gather(sizes, size)
    counts = [int(each) for each in sizes]
    padded = torch.frombuffer(bytearray(data.ljust(max(counts), b"\0")), dtype=torch.uint8).to(device)
    received = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(received, padded)
    return [each.cpu().numpy().tobytes()[:count] for each, count in zip(received, counts)]


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")


def broadcast_tensors(tensors: dict[str, torch.Tensor] | None) -> dict[str, torch.Tensor]:
    """Returns the tensors of rank 0 on each rank, on the CPU. A collective call. The others give None."""
    if world_size() == 1:
        return tensors or {}
    layout = from_first_rank(lambda: [(name, t.shape, t.dtype) for name, t in (tensors or {}).items()])
    device = _device()
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
        """Returns whether the training must stop after this step, which has just ended.

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
