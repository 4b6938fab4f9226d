"""Intercepts calls of torch's functions: replaces CUDA by the CPU in arguments, and records each result's device.

It is a TorchFunctionMode, torch's override mechanism, and stays active in this thread and in threads that it starts.
torch deactivates a mode while it handles a function: code inside sees the real CPU tensors.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional
from torch.overrides import TorchFunctionMode
from torch.utils import _device

from shoal_rehearsal.torch import devices
from shoal_rehearsal.torch.devices import (
    CPU,
    UNKNOWN,
    Placement,
    common_placement,
    placement_of,
    set_placement,
    set_unknown_placement,
    tensors_in,
)
from shoal_rehearsal.torch.half_kernels import HAS_HALF, SinglePrecision, lacks_kernel
from shoal_rehearsal.torch.overrides import OVERRIDES, translate_device

_LAYERS = (
    *("linear", "bilinear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
    *("embedding", "embedding_bag", "batch_norm", "layer_norm", "group_norm", "instance_norm", "lstm", "gru"),
    *("scaled_dot_product_attention", "multi_head_attention_forward"),
)
_LOSSES = (
    *("cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "kl_div"),
    *("binary_cross_entropy", "binary_cross_entropy_with_logits"),
)
_OPERATIONS = (
    *("add", "sub", "mul", "div", "true_divide", "matmul", "mm", "bmm", "addmm", "baddbmm", "cat", "stack"),
    *("eq", "ne", "add_", "sub_", "mul_", "div_", "__matmul__", "__eq__", "__ne__"),
)
_NEED_ONE_DEVICE = {
    getattr(owner, name)
    for owner in (torch.nn.functional, torch, torch.Tensor)
    for name in (*_LAYERS, *_LOSSES, *_OPERATIONS)
    if hasattr(owner, name)
}


_WITH_OUT_DTYPE = {getattr(torch, name) for name in ("mm", "bmm", "addmm", "baddbmm")}

_BACKWARDS = (torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad)
"""They run with `SinglePrecision` already, and cannot be called twice."""


def require_same_device(func: Any, tensors: Sequence[torch.Tensor]) -> None:
    """Raises RuntimeError, with CUDA's text, if a layer, loss or arithmetic has tensors on different devices.

    Unknown placements don't count. Scalar tensors may be on the CPU, as with CUDA.
    """
    if len(tensors) < 2 or func not in _NEED_ONE_DEVICE:
        return
    found = {placement for tensor in tensors if tensor.dim() and (placement := placement_of(tensor)) is not None}
    if len(found) > 1:
        named = " and ".join(sorted(map(str, found), reverse=True)[:2])
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, {named}! "
            f"(in {getattr(func, '__name__', func)}; found by the rehearsal)"
        )


class EmulationMode(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Calls a function or its override, and records placements. Raises RuntimeError if devices differ."""
        override = OVERRIDES.get(func)
        if override is not None:
            return override(self, *args, **(kwargs or {}))
        positional, named = list(args), dict(kwargs or {})
        tensors = list(tensors_in((*positional, *named.values())))
        require_same_device(func, tensors)
        requested = _replace_devices(positional, named) or _default_placement(func, tensors, named)
        if func in _WITH_OUT_DTYPE:
            _cast_to_out_dtype(positional, named)
        is_to_pin = named.pop("pin_memory", False)  # no CPU allocator pins without a GPU
        result = _call(func, positional, named)
        if requested is None:
            set_unknown_placement(result, common_placement(tensors))
        else:
            set_placement(result, None if requested is UNKNOWN else requested)
        return OVERRIDES[torch.Tensor.pin_memory](self, result) if is_to_pin else result


def _call(func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Calls a function, in single precision where the CPU has no kernel for float16."""
    try:
        return func(*args, **kwargs)
    except RuntimeError as error:
        if not lacks_kernel(error) or func in _BACKWARDS:
            raise
    with SinglePrecision():  # type: ignore[no-untyped-call]
        return func(*args, **kwargs)


def _replace_devices(args: list[Any], kwargs: dict[str, Any]) -> Placement:
    """Replaces CUDA by the CPU in a call's arguments, in place. Returns the requested device; None if there is none."""
    requested: Placement = None
    for index, arg in enumerate(args):
        if isinstance(arg, torch.device) or devices.is_cuda(arg):
            requested, args[index] = translate_device(arg)
    if kwargs.get("device") is not None:
        requested, kwargs["device"] = translate_device(kwargs["device"])
    return requested


def _cast_to_out_dtype(args: list[Any], kwargs: dict[str, Any]) -> None:
    """Replaces the argument `out_dtype`, for which the CPU has no kernel, by inputs in that dtype, in place."""
    dtype = kwargs.pop("out_dtype", None) or next((arg for arg in args if isinstance(arg, torch.dtype)), None)
    if dtype is not None:
        args[:] = [arg.to(dtype) if isinstance(arg, torch.Tensor) else arg for arg in args if arg is not dtype]
        kwargs.update({name: arg.to(dtype) for name, arg in kwargs.items() if isinstance(arg, torch.Tensor)})


def _default_placement(func: Any, tensors: list[torch.Tensor], kwargs: dict[str, Any]) -> Placement:
    """Returns a new tensor's placement by torch.set_default_device; for CUDA, sets `kwargs["device"]` to the CPU.

    Without a default, it is the CPU, or None if an argument is a tensor, no tensor is created, or a device is given.
    """
    if func not in _device._device_constructors() or kwargs.get("device") is not None:
        return None
    default: Placement = getattr(_device, "CURRENT_DEVICE", None)  # torch 2.0 lacks it: its own mode is above ours
    if default is not None and default.type == "cuda":
        kwargs["device"] = CPU
        return devices.resolve(default)
    return CPU if default is None and not tensors else None


def patch(_: int) -> None:
    """Activates the mode in this thread and, by patching Thread.start, in threads that a thread with the mode starts.

    It also replaces autograd's engine, so that the script's functions in a backward pass run with the mode.
    """
    mode: Any = EmulationMode()
    mode.__enter__()
    thread_class: Any = threading.Thread
    variable: Any = torch.autograd.Variable
    start = thread_class.start

    @functools.wraps(start)
    def start_with_mode(thread: threading.Thread) -> None:
        if torch._C._is_torch_function_mode_enabled():  # not for threads of code that sees the real tensors
            thread.run = _with_mode(mode, thread.run)  # type: ignore[method-assign]
        start(thread)

    thread_class.start = start_with_mode
    variable._execution_engine = _AutogradEngine(mode, variable._execution_engine)


class _AutogradEngine:
    """Wraps autograd's engine, so that the script's functions in a backward pass run with the mode."""

    def __init__(self, mode: EmulationMode, engine: Any) -> None:
        self._mode = mode
        self._engine = engine
        self._precision: Any = contextlib.nullcontext if HAS_HALF else SinglePrecision

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        with contextlib.nullcontext() if _is_entered() else self._mode, self._precision():
            return self._engine.run_backward(*args, **kwargs)


def _is_entered() -> bool:
    stack = range(torch._C._len_torch_function_stack())
    return any(isinstance(torch._C._get_function_stack_at(index), EmulationMode) for index in stack)


def _with_mode(mode: TorchFunctionMode, run: Callable[[], None]) -> Callable[[], None]:
    def run_with_mode() -> None:
        with mode:
            run()

    return run_with_mode
