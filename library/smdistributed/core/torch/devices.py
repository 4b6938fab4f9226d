"""CUDA devices: which one a rank takes, and how tensors on them travel.

NCCL carries them where every rank has a device of its own. Where ranks share one, or NCCL is missing, they are staged:
copied to the host, exchanged there, and copied back; or refused, where NCCL is asked for.
"""

from __future__ import annotations

import ctypes
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
from smdistributed.core.exceptions import SMDDPNCCLError
from smdistributed.core.launch import LaunchError, read_launch
from smdistributed.core.shared_memory import exchange
from smdistributed.core.torch.ordered import completed
from smdistributed.core.torch.torchs_own import TorchsOwn

_MESSAGES = ("send", "recv", "recv_anysource")  # their handles know more: who has sent
_READ_AS_WELL = ("allreduce", "allreduce_coalesced", "reduce", "broadcast", "send")  # the first argument


def take_device() -> None:
    """Make the CUDA device numbered like the local rank the current one, if this process sees so many.

    A device that the script has chosen before stays. A launcher may let each rank see its own device alone: that is
    number 0. Whether ranks share one shows when they meet (`open_cuda`).
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


def device_of(group: Any) -> torch.device:
    """Where a few numbers must be to go through a group; None: that of all ranks.

    NCCL takes nothing else than what is on its devices. Otherwise the CPU's are best: they wait for no device.
    """
    if dist.get_backend(group) in ("nccl", "cuda:nccl"):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def open_cuda(store: Store, rank: int, size: int, timeout: timedelta, on_cpu: Any, asked: str = "") -> Any:
    """Return what carries tensors on CUDA devices, the same on all ranks: torch's NCCL group, or `Staged`.

    store: of this group alone. on_cpu: the process group for the copies. asked: what asks for NCCL and for nothing
    else, such as a backend "cuda:nccl"; SMDDP_ENGINE=nccl does so too. Rank 0 warns of copies, and says why.

    Raises SMDDPNCCLError, on all ranks, where NCCL is asked for and cannot carry them, and where NCCL does not start.
    """
    problem = without_nccl(store, rank, size)
    if problem:
        asked = asked or ("SMDDP_ENGINE=nccl" if os.environ.get("SMDDP_ENGINE") == "nccl" else "")
        if asked:
            raise refusal(problem, asked)
        if rank == 0:
            warnings.warn(f"CUDA tensors are copied to the host to be reduced: {problem}.", stacklevel=2)
        return Staged(on_cpu)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    try:
        return TorchsOwn(dist.ProcessGroupNCCL(PrefixStore("nccl", store), rank, size, options))
    except RuntimeError as error:
        raise SMDDPNCCLError(f"NCCL does not start on rank {rank}: {error}") from error


def lacks_nccl() -> str:
    """Why this process cannot use NCCL; empty: it can, unless it shares its device (`without_nccl`)."""
    if not dist.is_nccl_available():
        return f"has a torch without NCCL ({torch.__version__})"
    return "" if torch.cuda.device_count() else "sees no CUDA device"


def leave_to_host(store: Store, rank: int, problem: str) -> None:
    """Tell ranks that ask `without_nccl` why this one does not use NCCL, without waiting for them."""
    store.set(f"device-{rank}", json.dumps(("", "", problem)))


def without_nccl(store: Store, rank: int, size: int) -> str:
    """Why NCCL cannot carry the tensors of these ranks, the same on all of them; empty: it can."""
    told = [json.loads(text) for text in exchange(store, "device", rank, size, json.dumps(_device()))]
    problems = [f"rank {other} {problem}" for other, (_, _, problem) in enumerate(told) if problem]
    if problems:
        return "; ".join(problems)
    return _shared([name for name, _, _ in told], [called for _, called, _ in told])


def refusal(problem: str, asked: str = "SMDDP_ENGINE=nccl") -> SMDDPNCCLError:
    """What is raised where NCCL is asked for and cannot be had."""
    return SMDDPNCCLError(
        f"{asked}, and NCCL cannot carry the CUDA tensors of this group: {problem}. "
        "NCCL needs a torch that has it, and a CUDA device for each rank: start no more ranks on a host than it has "
        "devices, and let each rank see its own (CUDA_VISIBLE_DEVICES, torch.cuda.set_device). "
        "SMDDP_ENGINE=auto and the backend smddp alone copy the tensors to the host instead."
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
    problem = lacks_nccl()
    if problem:
        return "", "", problem
    device = torch.cuda.current_device()
    properties = torch.cuda.get_device_properties(device)
    called = f"cuda:{device} ({properties.name}) of {socket.gethostname()}"
    uuid = str(getattr(properties, "uuid", "") or _uuid(device))  # the same in all containers of a machine
    return uuid or f"{segment.this_process().host}:{_visible(device)}", called, ""


def _uuid(device: int) -> str:
    """A device's own number, by NVIDIA's driver: torch 2.0 does not tell it. Empty where the driver does not either."""
    handle, uuid = ctypes.c_int(), (ctypes.c_ubyte * 16)()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        failed = driver.cuDeviceGet(ctypes.byref(handle), device) or driver.cuDeviceGetUuid(uuid, handle)
    except (OSError, AttributeError):  # no driver, or one without the function
        return ""
    return "" if failed else bytes(uuid).hex()


def _visible(device: int) -> str:
    """What the host calls a device that this process numbers so: each may see others under the same numbers."""
    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    return named[device] if device < len(named) and named[device] else str(device)


class Staged:
    """A process group's methods for tensors that are not on the CPU: copies of them go through another group.

    The first argument of each is what it writes, which alone is copied back.
    """

    def __init__(self, on_cpu: Any) -> None:
        self._on_cpu = on_cpu

    def __getattr__(self, name: str) -> Callable[..., Any]:
        @torch.no_grad()
        def staged(written: Any, *arguments: Any) -> Any:
            pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
            with timeline.span("wait", name):  # whoever calls is blocked until it is done
                results = _on_the_host(written, name in _READ_AS_WELL, pairs)
                given = [_on_the_host(argument, True) for argument in arguments]
                work = getattr(self._on_cpu, name)(results, *given)
                work.wait()
                if name != "send":
                    for tensor, copy in pairs:
                        tensor.copy_(copy)
            return work if name in _MESSAGES else completed([tensor for tensor, _ in pairs])

        return staged


def _on_the_host(argument: Any, filled: bool, pairs: list[tuple[torch.Tensor, torch.Tensor]] | None = None) -> Any:
    """The argument with all its tensors, in however deep lists, on the CPU: pinned, where that is faster.

    filled: whether they hold what the tensors hold. pairs: takes each tensor and its copy.
    """
    if isinstance(argument, (list, tuple)):
        return [_on_the_host(each, filled, pairs) for each in argument]
    if not isinstance(argument, torch.Tensor):
        return argument
    tensor = argument.detach()
    if tensor.layout is not torch.strided:
        copy = tensor.to("cpu", copy=True)
    else:
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        if filled:
            copy.copy_(tensor)
    if pairs is not None:
        pairs.append((argument, copy))
    return copy
