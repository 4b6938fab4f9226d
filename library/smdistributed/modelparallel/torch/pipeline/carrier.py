"""Tensors from one stage's device to another's, by torch's process group of that device: NCCL for GPUs.

`Carrier` does the work on the device. `transfers` decides when.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from smdistributed.core.torch.devices import nccl_problem, publish_nccl_problem
from smdistributed.modelparallel.backend.exceptions import SMPConfigError, SMPRuntimeError
from smdistributed.modelparallel.torch.pipeline.packing import Meta

VARIABLE = "SMP_STAGE_TRANSFERS"
CHOICES = ("host", "auto", "nccl")
_LEAST_BYTES = 256 << 10  # below, signals cost more than copies through the host; not measured on a GPU
_WARM_UP_BYTES = 1 << 20
_TIMEOUTS = 2  # torch's own limit, which ends the process, as a multiple of the limit of a transfer
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 20e-6, 1e-3


class Carrier:
    """Sends and receives tensors of one device. One thread at a time may use it.

    Args:
        group: A process group of torch with the stages as its ranks.
        device: Where this stage has its tensors.
        least_bytes: Shorter tensors are not for this.
    """

    def __init__(self, group: Any, device: torch.device, least_bytes: int = _LEAST_BYTES) -> None:
        self.group, self.device, self._least_bytes = group, device, least_bytes
        self._stream: Any = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def takes(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on this very device, long enough, and a plain array."""
        is_plain = tensor.layout is torch.strided and not tensor.is_quantized
        return (
            is_plain
            and tensor.device == self.device
            and tensor.numel() * tensor.element_size() >= max(self._least_bytes, 1)
        )

    def copy(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns detached, contiguous copies, which modules cannot change in place. Waits until they are computed."""
        copies = [
            tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
            for tensor in tensors
        ]
        if self._stream is not None:
            computed: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            torch.cuda.current_stream(self.device).record_event(computed)
            computed.synchronize()
        return copies

    def allocate(self, metas: Sequence[Meta]) -> list[torch.Tensor]:
        """Returns empty tensors to receive into. Call it before both ranks begin: it may wait for the whole device."""
        with self._on_stream():
            return [torch.empty(meta[1], dtype=meta[0], device=self.device) for meta in metas]

    def send(self, tensors: Sequence[torch.Tensor], to: int, stopped: threading.Event, seconds: float) -> None:
        """Sends contiguous tensors to a stage, and waits until they are sent.

        Raises InterruptedError if `stopped` is set, TimeoutError after `seconds`, RuntimeError if the process group
        fails.
        """
        self._exchange(self.group.send, tensors, to, stopped, seconds)

    def receive(self, tensors: Sequence[torch.Tensor], source: int, stopped: threading.Event, seconds: float) -> None:
        """Fills contiguous tensors with those that a stage sends, and waits until they have arrived.

        Args:
            tensors: On the device.
            source: The stage's number.
            stopped: Ends the wait when it is set.
            seconds: How long to wait.

        Raises:
            InterruptedError: If `stopped` was set.
            TimeoutError: After `seconds`.
            RuntimeError: If the process group fails.
        """
        self._exchange(self.group.recv, tensors, source, stopped, seconds)

    def warm_up(self, stage: int, stages: int, stopped: threading.Event, seconds: float) -> None:
        """Lets each pair of stages connect and load the kernels of transfers, while nothing else runs.

        All stages call it. Pairs go one after the other, in the same order everywhere.

        Args:
            stage: This stage's number.
            stages: How many stages there are.
            stopped: Ends the wait when it is set.
            seconds: The limit of each exchange.

        Raises:
            SMPRuntimeError: If an exchange does not end in time.
            InterruptedError: If `stopped` was set.
        """
        tensor = torch.zeros(_WARM_UP_BYTES, dtype=torch.uint8, device=self.device)
        for lower in range(stages):
            for higher in range(lower + 1, stages):
                if stage in (lower, higher):
                    peer = lower + higher - stage
                    for exchange in (self.send, self.receive) if stage == lower else (self.receive, self.send):
                        try:
                            exchange([tensor], peer, stopped, seconds)
                        except TimeoutError as error:
                            problem = f"Stages {lower} and {higher} have exchanged nothing by NCCL: {error}."
                            raise SMPRuntimeError(f"{problem} Fix: set {VARIABLE}=host on all ranks.") from error

    def _exchange(
        self,
        call: Callable[..., Any],
        tensors: Sequence[torch.Tensor],
        peer: int,
        stopped: threading.Event,
        seconds: float,
    ) -> None:
        """Starts a message for each tensor, and waits for all of them.

        Raises InterruptedError if `stopped` is set, TimeoutError after `seconds`, RuntimeError if the process group
        fails. If `stopped` is set while it waits for the device, it aborts the group (not with torch 2.0). Without a
        CUDA stream, `stopped` and `seconds` have no effect.
        """
        deadline = time.monotonic() + seconds
        with self._on_stream():
            works = [call([_bytes_of(tensor)], peer, tag) for tag, tensor in enumerate(tensors)]
            for work in works:
                work.wait()  # with NCCL this stream waits, not the thread
            ended = None if self._stream is None else self._stream.record_event()
        pause = _FIRST_PAUSE_SECONDS
        while ended is not None and not ended.query():
            if stopped.is_set():
                getattr(self.group, "abort", lambda: None)()  # torch 2.0 has none: the end of the process does it
                raise InterruptedError
            if time.monotonic() > deadline:
                raise TimeoutError(f"the device has not finished within {seconds:g} s")
            time.sleep(pause)
            pause = min(1.5 * pause, _LONGEST_PAUSE_SECONDS)

    def _on_stream(self) -> AbstractContextManager[object]:
        """Queues device work on the carrier's own stream, so that it does not wait for computation."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A view of a contiguous tensor that any process group takes: NCCL does not have every dtype."""
    return tensor.view(-1).view(torch.uint8)


def read_choice(environ: Mapping[str, str]) -> str:
    """Reads SMP_STAGE_TRANSFERS; "host" if it is unset or empty. Raises SMPConfigError for an unknown value."""
    choice = environ.get(VARIABLE) or CHOICES[0]
    if choice not in CHOICES:
        raise SMPConfigError(f"{VARIABLE} is {choice!r}: it must be one of {', '.join(map(repr, CHOICES))}.")
    return choice


def open_carrier(store: Store, rank: int, size: int, replicas: int, seconds: float) -> Carrier | None:
    """Opens NCCL between the stages of a job, if SMP_STAGE_TRANSFERS asks for it.

    Every rank calls it. If the setting is not "host" and there is one replica, ranks wait for each other to compare
    devices.

    Prints to stderr, on rank 0, how tensors travel and why, unless nothing but the host was asked for.

    Args:
        store: A key-value store with a prefix of its own.
        rank: This rank, which is its stage's number if there is one replica.
        size: How many ranks the job has.
        replicas: How many pipelines it has. With several, tensors go through the host, because NCCL averages gradients
            on these devices.
        seconds: How long a transfer may take.

    Returns:
        The carrier; `warm_up` is to be called on all stages. None: tensors go through the host.

    Raises:
        SMPConfigError: If the setting is wrong, or it is "nccl" and NCCL cannot be used.
    """
    choice = read_choice(os.environ)
    if choice == "host" or size == 1:
        publish_nccl_problem(store, rank, f"has {VARIABLE}=host")
        return None
    problem = "the job has several replicas of the model" if replicas > 1 else nccl_problem(store, rank, size)
    if problem and choice == "nccl":
        raise SMPConfigError(
            f"{VARIABLE} is 'nccl', and NCCL cannot carry tensors between stages: {problem}. "
            f"Fix: set {VARIABLE}=auto on all ranks, or give each stage a GPU of its own."
        )
    if rank == 0:
        how = f"the host's memory: {problem}" if problem else "NCCL, from GPU to GPU"
        print(f"smp: large tensors go from stage to stage through {how}.", file=sys.stderr, flush=True)
    return None if problem else Carrier(open_group(store, rank, size, _TIMEOUTS * seconds), _device())


def open_group(store: Store, rank: int, size: int, seconds: float) -> Any:
    """Opens a process group of NCCL, of all stages; each of them calls it."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=seconds)
    return dist.ProcessGroupNCCL(PrefixStore("nccl", store), rank, size, options)


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())
