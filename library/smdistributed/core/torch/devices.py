"""CUDA devices: which one a rank takes, and how tensors on them travel.

NCCL carries them where every rank has a device of its own. Where ranks share one, or NCCL is missing, they are staged:
copied to the host, exchanged there, and copied back; or refused, with SMDDP_ENGINE=nccl.
"""

from __future__ import annotations

import json
import os
import socket
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from smdistributed.core import segment, timeline
from smdistributed.core.exceptions import SMDDPError
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


def device_of(group: Any) -> torch.device:
    """Where a few numbers must be to go through a group; None: that of all ranks.

    NCCL takes nothing else than what is on its devices. Otherwise the CPU's are best: they wait for no device.
    """
    if dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def open_cuda(store: Store, rank: int, size: int, timeout: timedelta, on_cpu: Any) -> Any:
    """Return what carries tensors on CUDA devices, the same on all ranks: torch's NCCL group, or `Staged`.

    store: of this group alone. on_cpu: the process group for the copies.

    Raises SMDDPError, on all ranks, where SMDDP_ENGINE=nccl and NCCL cannot carry them.
    """
    problem = without_nccl(store, rank, size)
    if problem:
        if os.environ.get("SMDDP_ENGINE") == "nccl":
            raise refusal(problem)
        return Staged(on_cpu)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(PrefixStore("nccl", store), rank, size, options)


def without_nccl(store: Store, rank: int, size: int) -> str:
    """Why NCCL cannot carry the tensors of these ranks, the same on all of them; empty: it can."""
    told = [json.loads(text) for text in exchange(store, "device", rank, size, json.dumps(_device()))]
    problems = [f"rank {other} {problem}" for other, (_, _, problem) in enumerate(told) if problem]
    if problems:
        return "; ".join(problems)
    return _shared([name for name, _, _ in told], [called for _, called, _ in told])


def refusal(problem: str) -> SMDDPError:
    """What is raised where SMDDP_ENGINE=nccl cannot be had."""
    return SMDDPError(
        f"SMDDP_ENGINE=nccl, and NCCL cannot carry the CUDA tensors of this group: {problem}. "
        "NCCL needs a torch that has it, and a CUDA device for each rank: start no more ranks on a host than it has "
        "devices, and let each rank see its own (CUDA_VISIBLE_DEVICES, torch.cuda.set_device). "
        "SMDDP_ENGINE=auto copies the tensors to the host instead."
    )


def _shared(names: Sequence[str], called: Sequence[str]) -> str:
    """Which ranks have the same device; empty: none have."""
    for rank, name in enumerate(names):
        first = names.index(name)
        if first != rank:
            return f"rank {first} and rank {rank} share one CUDA device, {called[rank]}"
    return ""


def _device() -> tuple[str, str, str]:
    """This rank's CUDA device: named as no other one is, named for people, and why NCCL cannot use it (or empty)."""
    if not dist.is_nccl_available():
        return "", "", f"has a torch without NCCL ({torch.__version__})"
    if not torch.cuda.device_count():
        return "", "", "sees no CUDA device"
    device, host = torch.cuda.current_device(), segment.this_process().host
    properties = torch.cuda.get_device_properties(device)
    called = f"cuda:{device} ({properties.name}) of {socket.gethostname()}"
    return f"{host}:{getattr(properties, 'uuid', device)}", called, ""


class Staged:
    """A process group's methods for tensors that are not on the CPU: copies of them go through another group."""

    def __init__(self, on_cpu: Any) -> None:
        self._on_cpu = on_cpu

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def staged(*arguments: Any) -> Any:
            copies: list[tuple[torch.Tensor, torch.Tensor]] = []
            with timeline.span("wait", name):  # whoever calls is blocked until it is done
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
