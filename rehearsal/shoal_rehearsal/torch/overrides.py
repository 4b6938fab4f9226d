"""Overrides functions that reveal or change a tensor's device: `tensor.device`, `to`, `cuda`, `numpy` and others.

Each override gets the mode, which it ignores, and the arguments of the function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from shoal_rehearsal.torch import devices
from shoal_rehearsal.torch.devices import CPU, UNKNOWN, Placement, placement_of, set_placement, set_unknown_placement

Tensor = torch.Tensor
_Tensor: Any = torch.Tensor  # mypy takes its descriptors for their values
_pinned: Any = WeakTensorKeyDictionary()


def translate_device(device: Any) -> tuple[Placement, Any]:
    """Returns a device argument's placement and the device for torch.

    The placement is None if it is neither on CUDA nor on the CPU. UNKNOWN equals CPU: compare with `is`.
    """
    if type(device) is int or devices.is_cuda(device):
        return devices.resolve(device), CPU
    if device is UNKNOWN:
        return UNKNOWN, CPU
    return (CPU if torch.device(device).type == "cpu" else None), device


def move(tensor: Tensor, placement: torch.device) -> Tensor:
    """Returns a tensor on an emulated device: itself if it is there, otherwise a copy."""
    if placement_of(tensor) == placement:
        return tensor
    moved = tensor.clone()
    set_placement(moved, placement)
    return moved


def _to(_: object, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Replaces Tensor.to: casts as torch does, and makes a copy if the emulated device changes."""
    requested, args = _destination(args, kwargs)
    result = tensor.to(*args, **kwargs)
    if requested is None or requested is UNKNOWN:
        if result is not tensor:
            set_placement(result, placement_of(tensor) if requested is None and result.device.type == "cpu" else None)
        return result
    if result is not tensor:
        set_placement(result, requested)
    return move(result, requested)


def _destination(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Placement, tuple[Any, ...]]:
    """Returns the device that Tensor.to is called with (by position, name or tensor), and other arguments.

    It is None if none is named, UNKNOWN if a tensor's placement is. The real one replaces it in `kwargs`.
    """
    if kwargs.get("device") is not None:
        requested, kwargs["device"] = translate_device(kwargs["device"])
        return requested, args
    target = args[0] if args else kwargs.get("other")
    if isinstance(target, Tensor):
        return placement_of(target) or UNKNOWN, args
    if isinstance(target, (torch.device, str)) or type(target) is int:
        requested, real = translate_device(target)
        return requested, (real, *args[1:])
    return None, args


def _cuda(_: object, tensor: Tensor, device: Any = None, *args: Any, **kwargs: Any) -> Tensor:
    return move(tensor, devices.resolve(device))


def _cpu(_: object, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return move(tensor, CPU)


def _device(_: object, tensor: Tensor, *args: Any) -> torch.device:
    """Returns UNKNOWN, which looks like cpu, for a tensor without placement: so tensors made on it have none either."""
    device: torch.device = tensor.device
    return placement_of(tensor) or (UNKNOWN if device.type == "cpu" else device)


def _is_cuda(_: object, tensor: Tensor, *args: Any) -> bool:
    return is_on_cuda(tensor)


def _is_cpu(_: object, tensor: Tensor, *args: Any) -> bool:
    return bool(tensor.is_cpu) and not is_on_cuda(tensor)


def _get_device(_: object, tensor: Tensor) -> int:
    placement = placement_of(tensor)
    return placement.index if placement is not None and placement.type == "cuda" else -1


def _set_data(_: object, tensor: Tensor, data: Tensor) -> None:
    tensor.data = data
    set_placement(tensor, placement_of(data))


def _pin_memory(_: object, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Replaces Tensor.pin_memory by a copy that counts as pinned. Raises RuntimeError for a CUDA tensor."""
    if is_on_cuda(tensor):
        raise RuntimeError(f"cannot pin '{_type_name(tensor)}' only dense CPU tensors can be pinned")
    if tensor in _pinned:
        return tensor
    copy = tensor.clone()
    set_placement(copy, CPU)
    _pinned[copy] = True
    return copy


def _is_pinned(_: object, tensor: Tensor, *args: Any, **kwargs: Any) -> bool:
    return tensor in _pinned


def _numpy(_: object, tensor: Tensor, *, force: bool = False) -> Any:
    if not force:
        _require_cpu(tensor)
    return tensor.numpy(force=force)


def _array(_: object, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    _require_cpu(tensor)
    return _Tensor.__array__(tensor, *args, **kwargs)


def _require_cpu(tensor: Tensor) -> None:
    if is_on_cuda(tensor):
        raise TypeError(
            f"can't convert {placement_of(tensor)} device type tensor to numpy. Use Tensor.cpu() to copy the tensor to "
            "host memory first."
        )


def _type(_: object, tensor: Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Replaces Tensor.type: returns the type's name, or the tensor in another type, on CUDA for types of torch.cuda."""
    if dtype is None:
        return _type_name(tensor)
    name = dtype if isinstance(dtype, str) else getattr(dtype, "cuda_type_name", "")
    if not name.startswith("torch.cuda."):
        result = tensor.type(dtype)
        set_unknown_placement(result, placement_of(tensor) if isinstance(dtype, torch.dtype) else CPU)
        return result
    result = tensor.type(name.replace("torch.cuda.", "torch."))
    placement = placement_of(tensor)
    return move(result, placement if placement is not None and placement.type == "cuda" else devices.resolve())


def _type_name(tensor: Tensor) -> str:
    name = str(tensor.type())
    return name.replace("torch.", "torch.cuda.", 1) if is_on_cuda(tensor) else name


def _parse_to(_: object, *args: Any, **kwargs: Any) -> Any:
    """Parses the arguments of Module.to. An ordinal is a CUDA device, which must exist."""
    if args and type(args[0]) is int:
        args = (devices.resolve(args[0]), *args[1:])
    return torch._C._nn._parse_to(*args, **kwargs)


def _pack_padded_sequence(_: object, tensor: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Packs sequences as torch does. The data stays on its device, and the lengths are always on the CPU."""
    data, batch_sizes = torch._VF._pack_padded_sequence(tensor, *args, **kwargs)
    set_placement(data, placement_of(tensor))
    set_placement(batch_sizes, CPU)
    return data, batch_sizes


def is_on_cuda(tensor: Tensor) -> bool:
    placement = placement_of(tensor)
    return placement is not None and placement.type == "cuda"


OVERRIDES: dict[Any, Callable[..., Any]] = {
    # These only parse a device, and must return it unchanged.
    torch.device: lambda _, *args, **kwargs: torch.device(*args, **kwargs),
    torch._C._nn._parse_to: _parse_to,
    _Tensor.to: _to,
    _Tensor.cuda: _cuda,
    _Tensor.cpu: _cpu,
    _Tensor.device.__get__: _device,
    _Tensor.is_cuda.__get__: _is_cuda,
    _Tensor.is_cpu.__get__: _is_cpu,
    _Tensor.get_device: _get_device,
    _Tensor.data.__set__: _set_data,
    _Tensor.pin_memory: _pin_memory,
    _Tensor.is_pinned: _is_pinned,
    _Tensor.numpy: _numpy,
    _Tensor.__array__: _array,
    _Tensor.type: _type,
    torch._VF._pack_padded_sequence: _pack_padded_sequence,
}
