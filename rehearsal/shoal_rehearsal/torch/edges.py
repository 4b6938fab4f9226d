"""Where tensors come from that torch's override mechanism does not see, and modes of torch's own."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.multiprocessing.reductions
from torch.utils import _device

from shoal_rehearsal.torch.devices import CPU
from shoal_rehearsal.torch.places import common_place, inherit, place_of, put, tensors_in


def stand_in(_: int) -> None:
    """Extend what makes tensors."""
    _parameters()
    tensor: Any = torch.Tensor
    function: Any = torch.autograd.Function
    function.apply = classmethod(_where_the_arguments_are(function.__dict__["apply"].__func__))
    if hasattr(_device, "CURRENT_DEVICE"):
        _default_device()
    else:  # torch 2.0, where indexing is not seen either
        tensor.__getitem__ = _where_the_arguments_are(tensor.__getitem__)
    torch.from_numpy = _on_the_cpu(torch.from_numpy)
    utils: Any = torch.utils
    if hasattr(utils, "swap_tensors"):  # not in torch 2.0
        utils.swap_tensors = _swapping_places(utils.swap_tensors)
    reductions: Any = torch.multiprocessing.reductions  # what a worker of a DataLoader sends
    reductions.rebuild_tensor = _on_the_cpu(reductions.rebuild_tensor)


def _on_the_cpu(function: Any) -> Any:
    @functools.wraps(function)
    def make(*args: Any, **kwargs: Any) -> Any:
        made = function(*args, **kwargs)
        put(made, CPU)
        return made

    return make


def _swapping_places(swap: Any) -> Any:
    """torch swaps no tensor that a weak reference points to, as those to the known places do."""

    @functools.wraps(swap)
    def swap_tensors(t1: torch.Tensor, t2: torch.Tensor) -> None:
        before = place_of(t1), place_of(t2)
        put((t1, t2), None)
        swap(t1, t2)
        put(t1, before[1])
        put(t2, before[0])

    return swap_tensors


def _where_the_arguments_are(function: Any) -> Any:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        inherit(result, common_place(tensors_in((*args, *kwargs.values()))))
        return result

    return call


def _parameters() -> None:
    """A parameter is where the tensor is that it is made of."""
    parameters: Any = torch.nn.Parameter
    make = parameters.__new__

    @functools.wraps(make)
    def make_and_place(cls: Any, data: Any = None, *args: Any, **kwargs: Any) -> Any:
        parameter = make(cls, data, *args, **kwargs)
        if data is not None:
            put(parameter, place_of(data))
        return parameter

    parameters.__new__ = make_and_place


def _default_device() -> None:
    """Torch's own mode for a default device lies below ours: what runs while ours is left would get CUDA from it."""
    context: Any = _device.DeviceContext
    handle = context.__torch_function__

    @functools.wraps(handle)
    def handle_on_cpu(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.device.type == "cuda" and not torch._C._len_torch_function_stack():
            return func(*args, **(kwargs or {}))
        return handle(self, func, types, args, kwargs)

    context.__torch_function__ = handle_on_cpu
