"""CUDA devices: which one a rank takes, and how tensors on them travel.

NCCL carries them where every rank has a device of its own. Where ranks share one, or NCCL is missing, they are staged:
copied to the host, exchanged there, and copied back.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from smdistributed.core import segment
from smdistributed.core.launch import LaunchError, read_launch
from smdistributed.core.shared_memory import exchange


def take_device() -> None:
    """Make the CUDA device numbered like the local rank the current one; warn where the host has too few.

    A device that the script has chosen before stays.
    """
    devices = torch.cuda.device_count()
    if not devices or torch.cuda.current_device():
        return
    try:
        local_rank = read_launch().local_rank
    except LaunchError:  # torch needs no local rank: then the script takes its device
        return
    if local_rank < devices:
        torch.cuda.set_device(local_rank)
        return
    warnings.warn(
        f"Local rank {local_rank} has no CUDA device of its own ({devices} on this host): tensors on it are copied to "
        "the host to be reduced.",
        stacklevel=2,
    )


def open_cuda(store: Store, rank: int, size: int, timeout: timedelta, on_cpu: Any) -> Any:
    """Return what carries tensors on CUDA devices, the same on all ranks: torch's NCCL group, or `Staged`.

    store: of this group alone. on_cpu: the process group for the copies.
    """
    named = exchange(store, "device", rank, size, _device_name())
    if "" in named or len(set(named)) < size:
        return Staged(on_cpu)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(PrefixStore("nccl", store), rank, size, options)


def _device_name() -> str:
    """This rank's CUDA device, as no other one is called; empty: it has none, or NCCL is missing."""
    if not torch.cuda.device_count() or not dist.is_nccl_available():
        return ""
    device = torch.cuda.current_device()
    return f"{segment.this_process().host}:{getattr(torch.cuda.get_device_properties(device), 'uuid', device)}"


class Staged:
    """A process group's methods for tensors that are not on the CPU: copies of them go through another group."""

    def __init__(self, on_cpu: Any) -> None:
        self._on_cpu = on_cpu

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def staged(*arguments: Any) -> Any:
            copies: list[tuple[torch.Tensor, torch.Tensor]] = []
            work = getattr(self._on_cpu, name)(*(_copied(argument, copies) for argument in arguments))
            work.wait()
            for tensor, copy in copies:
                tensor.detach().copy_(copy)
            return work

        return staged


def _copied(argument: Any, copies: list[tuple[torch.Tensor, torch.Tensor]]) -> Any:
    """The argument with all its tensors, in however deep lists, copied to the CPU: pinned, where that is faster."""
    if isinstance(argument, (list, tuple)):
        return [_copied(each, copies) for each in argument]
    if not isinstance(argument, torch.Tensor):
        return argument
    copy = torch.empty(argument.shape, dtype=argument.dtype, pin_memory=argument.is_cuda)
    copy.copy_(argument.detach())
    copies.append((argument, copy))
    return copy
