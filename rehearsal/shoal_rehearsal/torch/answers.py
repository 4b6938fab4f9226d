"""What a tensor answers where a CPU tensor would answer otherwise: its device, and moves between devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from shoal_rehearsal.torch import devices
from shoal_rehearsal.torch.devices import CPU, UNKNOWN
from shoal_rehearsal.torch.places import Place, inherit, place_of, put

Tensor = torch.Tensor
_Tensor: Any = torch.Tensor  # its descriptors are typed as their values
_pinned: Any = WeakTensorKeyDictionary()


def asked_and_given(device: Any) -> tuple[Place, Any]:
    """Return where a result is asked to be (None: on neither CUDA nor the CPU), and the device to give to torch."""
    if type(device) is int or devices.is_cuda(device):
        return devices.cuda(device), CPU
    if device is UNKNOWN:
        return UNKNOWN, CPU
    return (CPU if torch.device(device).type == "cpu" else None), device


def move(tensor: Tensor, place: torch.device) -> Tensor:
    """Return a tensor on another device: itself if it is there, else a copy."""
    if place_of(tensor) == place:
        return tensor
    moved = tensor.clone()
    put(moved, place)
    return moved


def _to(_: object, tensor: Tensor, *words: Any, **options: Any) -> Tensor:
    asked, words = _destination(words, options)
    result = tensor.to(*words, **options)
    if asked is None or asked is UNKNOWN:
        if result is not tensor:
            put(result, place_of(tensor) if asked is None and result.device.type == "cpu" else None)
        return result
    if result is not tensor:
        put(result, asked)
    return move(result, asked)


def _destination(words: tuple[Any, ...], options: dict[str, Any]) -> tuple[Place, tuple[Any, ...]]:
    """The device that Tensor.to is asked for: by position, by name, or that of another tensor."""
    if options.get("device") is not None:
        asked, options["device"] = asked_and_given(options["device"])
        return asked, words
    target = words[0] if words else options.get("other")
    if isinstance(target, Tensor):
        return place_of(target) or UNKNOWN, words
    if isinstance(target, (torch.device, str)) or type(target) is int:
        asked, given = asked_and_given(target)
        return asked, (given, *words[1:])
    return None, words


def _cuda(_: object, tensor: Tensor, device: Any = None, *words: Any, **options: Any) -> Tensor:
    return move(tensor, devices.cuda(device))


def _cpu(_: object, tensor: Tensor, *words: Any, **options: Any) -> Tensor:
    return move(tensor, CPU)


def _device(_: object, tensor: Tensor, *words: Any) -> torch.device:
    device: torch.device = tensor.device
    return place_of(tensor) or (UNKNOWN if device.type == "cpu" else device)


def _is_cuda(_: object, tensor: Tensor, *words: Any) -> bool:
    return on_cuda(tensor)


def _is_cpu(_: object, tensor: Tensor, *words: Any) -> bool:
    return bool(tensor.is_cpu) and not on_cuda(tensor)


def _get_device(_: object, tensor: Tensor) -> int:
    place = place_of(tensor)
    return place.index if place is not None and place.type == "cuda" else -1


def _set_data(_: object, tensor: Tensor, data: Tensor) -> None:
    tensor.data = data
    put(tensor, place_of(data))


def _pin_memory(_: object, tensor: Tensor, *words: Any, **options: Any) -> Tensor:
    if on_cuda(tensor):
        raise RuntimeError(f"cannot pin '{_type_name(tensor)}' only dense CPU tensors can be pinned")
    if tensor in _pinned:
        return tensor
    copy = tensor.clone()
    put(copy, CPU)
    _pinned[copy] = True
    return copy


def _is_pinned(_: object, tensor: Tensor, *words: Any, **options: Any) -> bool:
    return tensor in _pinned


def _numpy(_: object, tensor: Tensor, *, force: bool = False) -> Any:
    if not force:
        _refuse_numpy(tensor)
    return tensor.numpy(force=force)


def _array(_: object, tensor: Tensor, *words: Any, **options: Any) -> Any:
    _refuse_numpy(tensor)
    return _Tensor.__array__(tensor, *words, **options)


def _refuse_numpy(tensor: Tensor) -> None:
    if on_cuda(tensor):
        raise TypeError(
            f"can't convert {place_of(tensor)} device type tensor to numpy. Use Tensor.cpu() to copy the tensor to "
            "host memory first."
        )


def _type(_: object, tensor: Tensor, dtype: Any = None, *words: Any, **options: Any) -> Any:
    if dtype is None:
        return _type_name(tensor)
    name = dtype if isinstance(dtype, str) else getattr(dtype, "cuda_type_name", "")
    if not name.startswith("torch.cuda."):
        result = tensor.type(dtype)
        inherit(result, place_of(tensor) if isinstance(dtype, torch.dtype) else CPU)
        return result
    result = tensor.type(name.replace("torch.cuda.", "torch."))
    place = place_of(tensor)
    return move(result, place if place is not None and place.type == "cuda" else devices.cuda())


def _type_name(tensor: Tensor) -> str:
    name = str(tensor.type())
    return name.replace("torch.", "torch.cuda.", 1) if on_cuda(tensor) else name


def _parse_to(_: object, *words: Any, **options: Any) -> Any:
    """What Module.to reads its arguments with: an ordinal is a CUDA device."""
    if words and type(words[0]) is int:
        words = (devices.cuda(words[0]), *words[1:])
    return torch._C._nn._parse_to(*words, **options)


def _pack_padded_sequence(_: object, tensor: Tensor, *words: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """The lengths of a packed sequence are on the CPU always."""
    data, batch_sizes = torch._VF._pack_padded_sequence(tensor, *words, **options)
    put(data, place_of(tensor))
    put(batch_sizes, CPU)
    return data, batch_sizes


def on_cuda(tensor: Tensor) -> bool:
    """Whether a tensor is known to be on a CUDA device."""
    place = place_of(tensor)
    return place is not None and place.type == "cuda"


ANSWERS: dict[Any, Callable[..., Any]] = {
    # They only read a device, and have to return it as it is.
    torch.device: lambda _, *words, **options: torch.device(*words, **options),
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
