"""Places tensors that are created outside of torch's override mechanism, also by loading a checkpoint."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.multiprocessing.reductions
from torch.utils import _device, checkpoint

from shoal_rehearsal.torch import devices
from shoal_rehearsal.torch.devices import (
    CPU,
    common_placement,
    placement_of,
    set_placement,
    set_unknown_placement,
    tensors_in,
)

_BEFORE_TORCHS_OWN = 5  # torch's restorers have 10 and more


def patch(_: int) -> None:
    """Patches functions that create tensors: results get the placement of inputs, the default device or the CPU."""
    _patch_parameters()
    _patch_checkpoints()
    tensor: Any = torch.Tensor
    function: Any = torch.autograd.Function
    function.apply = classmethod(_placing_with_arguments(function.__dict__["apply"].__func__))
    if hasattr(_device, "CURRENT_DEVICE"):
        _patch_default_device()
    else:  # in torch 2.0, the mode does not see indexing either
        tensor.__getitem__ = _placing_with_arguments(tensor.__getitem__)
    tensor._make_wrapper_subclass = staticmethod(_wrapping_on_cpu(tensor._make_wrapper_subclass))
    torch.from_numpy = _placing_on_cpu(torch.from_numpy)
    utils: Any = torch.utils
    if hasattr(utils, "swap_tensors"):  # not in torch 2.0
        utils.swap_tensors = _swapping_placements(utils.swap_tensors)
    reductions: Any = torch.multiprocessing.reductions  # for tensors from workers of a DataLoader
    reductions.rebuild_tensor = _placing_on_cpu(reductions.rebuild_tensor)


def _placing_on_cpu(function: Any) -> Any:
    @functools.wraps(function)
    def make(*args: Any, **kwargs: Any) -> Any:
        made = function(*args, **kwargs)
        set_placement(made, CPU)
        return made

    return make


def _wrapping_on_cpu(function: Any) -> Any:
    """Wraps the constructor of wrapper subclasses: the wrapper's own device is the CPU, as for inner tensors."""

    @functools.wraps(function)
    def make(*args: Any, **kwargs: Any) -> Any:
        cpu = [CPU if devices.is_cuda(arg) else arg for arg in args]
        return function(*cpu, **{name: CPU if devices.is_cuda(arg) else arg for name, arg in kwargs.items()})

    return make


def _swapping_placements(swap: Any) -> Any:
    @functools.wraps(swap)
    def swap_tensors(t1: torch.Tensor, t2: torch.Tensor) -> None:
        before = placement_of(t1), placement_of(t2)
        # torch cannot swap a tensor with weak references, as `devices` has.
        set_placement((t1, t2), None)
        swap(t1, t2)
        set_placement(t1, before[1])
        set_placement(t2, before[0])

    return swap_tensors


def _placing_with_arguments(function: Any) -> Any:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        set_unknown_placement(result, common_placement(tensors_in((*args, *kwargs.values()))))
        return result

    return call


def _patch_parameters() -> None:
    parameters: Any = torch.nn.Parameter
    make = parameters.__new__

    @functools.wraps(make)
    def create(cls: Any, data: Any = None, *args: Any, **kwargs: Any) -> Any:
        parameter = make(cls, data, *args, **kwargs)
        if data is not None:
            set_placement(parameter, placement_of(data))
        return parameter

    parameters.__new__ = create


def _patch_default_device() -> None:
    context: Any = _device.DeviceContext
    handle = context.__torch_function__

    @functools.wraps(handle)
    def handle_on_cpu(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # This mode is below ours, and would request CUDA while ours is inactive.
        if self.device.type == "cuda" and not torch._C._len_torch_function_stack():
            return func(*args, **(kwargs or {}))
        return handle(self, func, types, args, kwargs)

    context.__torch_function__ = handle_on_cpu


def _patch_checkpoints() -> None:
    """Lets `torch.save` and `torch.load` keep emulated devices, and activation checkpointing ignore them.

    It compares saved tensors, seen without the mode, with recomputed ones, seen with it: their devices would differ.
    """
    torch.serialization.register_package(_BEFORE_TORCHS_OWN, _location_of, _restore)
    tensor, utils = cast(Any, torch.Tensor), cast(Any, torch._utils)
    tensor._reduce_ex_internal = _marking_storages(tensor._reduce_ex_internal)
    utils._rebuild_tensor = _placing_by_storage(utils._rebuild_tensor)
    checks: dict[str, Callable[[torch.Tensor], Any]] = getattr(checkpoint, "_allowed_determinism_checks_to_fns", {})
    for name, found in checks.items():
        checks[name] = _without_devices(found)


def _without_devices(function: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
    @functools.wraps(function)
    def describe(tensor: torch.Tensor) -> Any:
        with torch._C.DisableTorchFunction():
            return function(tensor)

    return describe


def _marking_storages(reduce: Any) -> Any:
    """Wraps the method with which a tensor is pickled: its storage knows the emulated device then."""

    @functools.wraps(reduce)
    def reduce_ex(self: torch.Tensor, protocol: int) -> Any:
        reduced = reduce(self, protocol)
        for part in reduced[1]:
            if isinstance(part, torch.storage.TypedStorage):
                part._untyped_storage._emulated = placement_of(self)  # type: ignore[attr-defined]
        return reduced

    return reduce_ex


def _placing_by_storage(rebuild: Any) -> Any:
    """Wraps the function that makes a tensor of a loaded storage."""

    @functools.wraps(rebuild)
    def rebuild_tensor(storage: Any, *args: Any) -> torch.Tensor:
        tensor: torch.Tensor = rebuild(storage, *args)
        emulated = getattr(storage._untyped_storage, "_emulated", None)
        if emulated is not None:
            set_placement(tensor, emulated)
        return tensor

    return rebuild_tensor


def _location_of(storage: Any) -> str | None:
    """Returns the name that `torch.save` writes for a storage on an emulated GPU; None leaves it to torch."""
    placement = getattr(storage, "_emulated", None)
    return str(placement) if placement is not None and devices.is_cuda(placement) else None


def _restore(storage: Any, location: str) -> Any:
    """Returns the storage if its location is CUDA; None leaves it to torch. Raises RuntimeError for no such device."""
    if not devices.is_cuda(location):
        return None
    storage._emulated = devices.resolve(location)
    return storage
