"""Activation offloading (AWS API 1.6): inputs of checkpointed modules wait in the host's memory for backward.

torch's saved-tensor hooks copy them there, and back `horizon` checkpoints before backward needs them. Copies run on a
stream beside the one that computes. Tensors that are in the host's memory already, and parameters, stay where they are.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import checkpoint as torch_checkpoint
from torch.utils._pytree import tree_flatten, tree_unflatten

from smdistributed.core.options import warn_without_effect
from smdistributed.modelparallel.backend.exceptions import SMPUnsupportedError
from smdistributed.modelparallel.torch.pipeline.tasks import current_task

_horizon = 0
"""How many checkpoints ahead inputs are loaded; 0: they are not offloaded."""
_last: dict[int | None, weakref.ref[_Inputs]] = {}
"""The inputs that were offloaded last, by microbatch."""
_TENSOR = object()
"""Stands for a tensor among arguments."""


def offload_activations(horizon: int) -> None:
    """Offloads inputs of checkpointed modules from now on; 0: no longer. Warns if there is no GPU.

    Raises SMPUnsupportedError if torch is older than 2.1: its checkpoints keep their inputs.
    """
    global _horizon
    if horizon and not hasattr(torch_checkpoint, "_CheckpointFrame"):
        raise SMPUnsupportedError(
            f"'offload_activations' needs torch 2.1 or newer, and this is {torch.__version__}. Fix: use the image "
            "pytorch-latest, or leave it out: smp.set_activation_checkpointing alone saves most of the memory."
        )
    if horizon and not torch.cuda.is_available():
        warn_without_effect("'offload_activations' of mp_parameters", "activations are in the host's memory already")
    _horizon = horizon


def checkpoint(call: Callable[..., Any], *args: Any, preserve_rng_state: bool, **kwargs: Any) -> Any:
    """Calls a function, and computes it again in backward. If that is turned on, its input tensors are offloaded."""
    if not _horizon:
        options: Any = {"use_reentrant": False, "preserve_rng_state": preserve_rng_state}
        return torch_checkpoint.checkpoint(call, *args, **options, **kwargs)
    leaves, spec = tree_flatten((args, kwargs))
    kept = [_TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]

    def compute(*tensors: torch.Tensor) -> Any:
        given = iter(tensors)
        positional, named = tree_unflatten([next(given) if leaf is _TENSOR else leaf for leaf in kept], spec)
        return call(*positional, **named)

    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    del leaves, args, kwargs  # tensors are freed as soon as their copies are made
    inputs = _Inputs(_horizon)
    with saved_tensors_hooks(inputs.pack, inputs.unpack):
        return torch_checkpoint.checkpoint(
            compute, *tensors, use_reentrant=False, preserve_rng_state=preserve_rng_state
        )


class _Inputs:
    """The input tensors of one checkpoint. It knows the checkpoint before, of the same microbatch, while that lives."""

    def __init__(self, horizon: int) -> None:
        task = current_task()
        microbatch = task.microbatch if task else None
        self._horizon, self._before = horizon, _last.get(microbatch)
        _last[microbatch] = weakref.ref(self)
        self._copies: list[_HostCopy] = []

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | int:
        """Returns the number of a copy on the host; the tensor itself if it stays."""
        if not tensor.is_cuda or (tensor.is_leaf and tensor.requires_grad):
            return tensor
        self._copies.append(_HostCopy(tensor))
        return len(self._copies) - 1

    def unpack(self, packed: torch.Tensor | int) -> torch.Tensor:
        """Returns the tensor, and begins to load inputs of the checkpoints before it."""
        if isinstance(packed, torch.Tensor):
            return packed
        found = self._copies[packed].take()
        inputs: _Inputs | None = self
        for _ in range(self._horizon):
            inputs = inputs._before() if inputs and inputs._before else None
            for copy in inputs._copies if inputs else ():
                copy.load()
        return found


class _HostCopy:
    """A copy of a GPU's tensor in the host's memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._device = tensor.device
        self._loaded: tuple[torch.Tensor, Any] | None = None
        self._host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        stream = _copy_stream(tensor.device)
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(stream):
            self._host.copy_(tensor.detach(), non_blocking=True)
        tensor.record_stream(stream)

    def load(self) -> None:
        """Begins to copy it back, unless it has begun."""
        if self._loaded is None:
            stream = _copy_stream(self._device)
            with torch.cuda.stream(stream):
                loaded = self._host.to(self._device, non_blocking=True)
            self._loaded = loaded, stream.record_event()

    def take(self) -> torch.Tensor:
        """Returns the tensor on the GPU, ready for the current stream, and keeps only the copy on the host."""
        self.load()
        assert self._loaded
        (found, event), self._loaded = self._loaded, None
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(event)
        found.record_stream(stream)
        return found


_streams: dict[torch.device, Any] = {}


def _copy_stream(device: torch.device) -> Any:
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return _streams[device]
