"""CUDA devices: selects one for each rank, and opens the carrier of CUDA tensors.

NCCL carries CUDA tensors if every rank has a device of its own. If ranks share one, or NCCL is missing, tensors are
staged: copied to the host, exchanged there, and copied back. If NCCL is requested, that is an error instead.
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
from torch.distributed import Work

from smdistributed.core import segment, timeline
from smdistributed.core.exceptions import SMDDPError, SMDDPNCCLError
from smdistributed.core.launch import LaunchError, read_launch
from smdistributed.core.store import exchange_texts
from smdistributed.core.torch.collective_queue import completed

NCCL_FIX = "Fix: set NCCL_DEBUG=INFO, and read what NCCL prints."
_MESSAGES = ("send", "recv", "recv_anysource")  # a rank may begin several before it waits for one
_READS_FIRST = ("allreduce", "allreduce_coalesced", "reduce", "broadcast", "send")  # methods that read it and write it


def select_device() -> None:
    """Makes a CUDA device current, unless the script has: the local rank modulo the number of visible devices.

    If the launch environment is invalid, it does nothing. `open_cuda` finds out whether ranks share one.
    """
    devices = torch.cuda.device_count()
    if not devices or torch.cuda.current_device():
        return
    try:
        local_rank = read_launch().local_rank
    except LaunchError:  # torch needs no local rank: then the script selects its device
        return
    if device := local_rank % devices:
        torch.cuda.set_device(device)


def device_of(group: Any) -> torch.device:
    """Returns the device for small tensors of a group: one of NCCL's, otherwise the CPU, which waits for no device."""
    if dist.get_backend(group) in ("nccl", "cuda:nccl"):
        return current_device()
    return torch.device("cpu")


def current_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def open_cuda(store: Store, rank: int, size: int, timeout: timedelta, on_cpu: Any, requested: str = "") -> Any:
    """Opens the carrier of CUDA tensors; all ranks call it. Rank 0 warns, with the reason, if tensors are copied.

    `store` is the group's own. `on_cpu` is the process group for copies on the host. `requested` is the setting that
    requests only NCCL, for example "cuda:nccl"; empty: SMDDP_ENGINE decides.

    Returns torch's NCCL group, or `HostStaging`; the same on all ranks. Raises SMDDPNCCLError on all ranks if NCCL is
    requested and cannot carry the tensors. If NCCL does not start on one rank, it raises that there, requested or not.
    """
    problem = nccl_problem(store, rank, size)
    if problem:
        requested = requested or ("SMDDP_ENGINE=nccl" if os.environ.get("SMDDP_ENGINE") == "nccl" else "")
        if requested:
            raise nccl_error(problem, requested)
        if rank == 0:
            warnings.warn(f"CUDA tensors are copied to the host to be reduced: {problem}.", stacklevel=2)
        return HostStaging(on_cpu)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    try:
        return NativeBackend(dist.ProcessGroupNCCL(PrefixStore("nccl", store), rank, size, options))
    except RuntimeError as error:
        raise SMDDPNCCLError(f"NCCL does not start on rank {rank}: {error}. {NCCL_FIX}") from error


def local_nccl_problem() -> str:
    """Says why this process cannot use NCCL; empty: it can, unless it shares its device (see `nccl_problem`)."""
    if not dist.is_nccl_available():
        return f"has a torch without NCCL ({torch.__version__})"
    return "" if torch.cuda.device_count() else "sees no CUDA device"


def publish_nccl_problem(store: Store, rank: int, problem: str) -> None:
    """Tells ranks that call `nccl_problem` why this one cannot use NCCL, without waiting for them."""
    store.set(f"device-{rank}", json.dumps(("", "", problem)))


def nccl_problem(store: Store, rank: int, size: int) -> str:
    """Says why NCCL cannot carry the CUDA tensors of these ranks, the same on all; empty: it can. All call it."""
    devices = [json.loads(text) for text in exchange_texts(store, "device", rank, size, json.dumps(_device()))]
    problems = [f"rank {other} {problem}" for other, (_, _, problem) in enumerate(devices) if problem]
    if problems:
        return "; ".join(problems)
    return _describe_shared_device([name for name, _, _ in devices], [label for _, label, _ in devices])


def nccl_error(problem: str, requested: str = "SMDDP_ENGINE=nccl") -> SMDDPNCCLError:
    return SMDDPNCCLError(
        f"{requested}, but NCCL cannot carry the CUDA tensors of this group: {problem}. "
        "NCCL needs a torch that includes it, and a CUDA device for each rank. Fix: start at most as many ranks on a "
        "host as it has devices, and give each rank its own (CUDA_VISIBLE_DEVICES, torch.cuda.set_device). "
        "With SMDDP_ENGINE=auto and the backend smddp, tensors are copied to the host instead."
    )


def _describe_shared_device(names: Sequence[str], labels: Sequence[str]) -> str:
    for rank, name in enumerate(names):
        first = names.index(name)
        if first != rank:
            return f"rank {first} and rank {rank} share one CUDA device, {labels[rank]}"
    return ""


def _device() -> tuple[str, str, str]:
    """Returns this rank's CUDA device: a unique name, a label for people, and why NCCL cannot use it (or empty)."""
    problem = local_nccl_problem()
    if problem:
        return "", "", problem
    device = torch.cuda.current_device()
    properties = torch.cuda.get_device_properties(device)
    label = f"cuda:{device} ({properties.name}) of {socket.gethostname()}"
    uuid = str(getattr(properties, "uuid", "") or _uuid(device))  # the same in all containers of a machine
    return uuid or f"{segment.this_process().host}:{_host_number(device)}", label, ""


def _uuid(device: int) -> str:
    """Returns a device's UUID from NVIDIA's driver, as torch 2.0 does not have it; empty if the driver lacks it too."""
    handle, uuid = ctypes.c_int(), (ctypes.c_ubyte * 16)()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        failed = driver.cuDeviceGet(ctypes.byref(handle), device) or driver.cuDeviceGetUuid(uuid, handle)
    except (OSError, AttributeError):  # no driver, or one without the function
        return ""
    return "" if failed else bytes(uuid).hex()


def _host_number(device: int) -> str:
    """Returns the host's number of a device: CUDA_VISIBLE_DEVICES gives each process numbers of its own."""
    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    return named[device] if device < len(named) and named[device] else str(device)


class HostStaging:
    """A process group's methods for tensors that are not on the CPU: their copies go through another group.

    Each method writes only its first argument; only that is copied back. Collectives block until they have ended.
    """

    def __init__(self, on_cpu: Any) -> None:
        self._on_cpu = on_cpu

    def __getattr__(self, name: str) -> Callable[..., Any]:
        @torch.no_grad()
        def staged(written: Any, *arguments: Any) -> Any:
            pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
            if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
                raise SMDDPError(
                    f"{name} cannot be in a CUDA graph here: ranks share a CUDA device, or torch has no NCCL, so "
                    "tensors are copied to the host. Fix: give each rank its own device, or capture no collectives."
                )
            with timeline.span("wait", name):  # the caller blocks until it is done
                results = _copy_to_host(written, name in _READS_FIRST, pairs)
                given = [_copy_to_host(argument, True) for argument in arguments]
                work = getattr(self._on_cpu, name)(results, *given)
                if name in _MESSAGES:
                    return _StagedMessage(work, [] if name == "send" else pairs, results)
                work.wait()
                _copy_back(pairs)
            return completed([tensor for tensor, _ in pairs])

        return staged


class _StagedMessage(Work):
    """The handle of a message of copied tensors; `received` has pairs. gloo's own can be waited for only once."""

    def __init__(self, work: Any, received: list[tuple[torch.Tensor, torch.Tensor]], copies: Any) -> None:
        super().__init__()
        self._work, self._received, self._copies = work, received, copies

    @torch.no_grad()
    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Blocks until the message has ended; the tensors then have the received numbers."""
        if self._copies is not None:
            self._work.wait(timeout) if timeout else self._work.wait()
            _copy_back(self._received)
            self._copies = None
        return True

    def is_completed(self) -> bool:
        """Returns whether `wait` has been called: gloo's own handles do not know more."""
        return self._copies is None

    def _source_rank(self) -> int:
        """Returns the rank that has sent the message, for torch.distributed.recv without a source."""
        return int(self._work._source_rank())


def _copy_back(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for tensor, copy in pairs:
        tensor.copy_(copy)


def _copy_to_host(argument: Any, filled: bool, pairs: list[tuple[torch.Tensor, torch.Tensor]] | None = None) -> Any:
    """Returns the argument with copies on the CPU of all tensors, in pinned memory if that is faster.

    `filled`: whether the copies have the tensors' elements. `pairs` gets each tensor and its copy.
    """
    if isinstance(argument, (list, tuple)):
        return [_copy_to_host(each, filled, pairs) for each in argument]
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
