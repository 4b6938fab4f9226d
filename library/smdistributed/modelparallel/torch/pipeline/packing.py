"""Packs any picklable object as a pickle and its tensors, which travel as raw bytes.

Tensors are found wherever pickling finds them: in dataclasses, model outputs, caches. Unpack only objects of
authenticated ranks, because unpickling can run code.
"""

from __future__ import annotations

import ctypes
import io
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch

_Tensor = torch.Tensor
Meta = tuple[torch.dtype, tuple[int, ...], bool, bool]
"""A tensor's dtype, shape, whether it requires grad, and whether it is on a GPU."""


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, known: Callable[[object], object]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.tensors: list[_Tensor] = []
        self._known, self._places = known, dict[int, int]()

    def persistent_id(self, obj: object) -> object:
        """Pickles known objects by name, and tensors by their place in `tensors`, to which it adds new ones."""
        name = self._known(obj)
        if name is not None:
            return "known", name
        if isinstance(obj, torch.Tensor):
            place = self._places.setdefault(id(obj), len(self.tensors))
            if place == len(self.tensors):
                self.tensors.append(obj)
            return "tensor", place
        return None


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: Sequence[_Tensor], known: Callable[[Any], object]) -> None:
        super().__init__(file)
        self._tensors, self._known = tensors, known

    def persistent_load(self, pid: Any) -> object:
        kind, value = pid
        return self._tensors[value] if kind == "tensor" else self._known(value)


def pack(obj: object, known: Callable[[object], object] = lambda _: None) -> tuple[bytes, list[_Tensor]]:
    """Returns a pickle, and its tensors, each once. `known` names an object that both sides have, or returns None."""
    file = io.BytesIO()
    pickler = _Pickler(file, known)
    pickler.dump(obj)
    return file.getvalue(), pickler.tensors


def unpack(body: bytes, tensors: Sequence[_Tensor], known: Callable[[Any], object] = lambda name: name) -> Any:
    """Unpacks what `pack` returned. `known` returns the object of a name that `pack` got from its own."""
    return _Unpickler(io.BytesIO(body), tensors, known).load()


def meta_of(tensor: _Tensor) -> Meta:
    """Returns a tensor's metadata: see `Meta`."""
    return tensor.dtype, tuple(tensor.shape), tensor.requires_grad, tensor.is_cuda


def to_buffer(tensor: _Tensor) -> tuple[Any, object]:
    """Returns contiguous bytes, perhaps the tensor's own memory, and the object to keep while they are read."""
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    size = flat.numel() * flat.element_size()
    return (ctypes.c_char * size).from_address(flat.data_ptr()) if size else b"", flat


def _strides(shape: tuple[int, ...]) -> list[int]:
    """The strides of a contiguous tensor. torch's own function takes as long as a message."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return strides[::-1]


def from_buffer(buffer: bytearray, meta: Meta) -> _Tensor:
    """Makes a tensor on the CPU of these bytes, without a copy: it shares their memory."""
    dtype, shape = meta[:2]
    tensor = torch.empty(shape if not buffer else 0, dtype=dtype)
    if buffer:  # not as a view: modules may change what they get in place
        tensor.set_(torch.frombuffer(buffer, dtype=dtype).untyped_storage(), 0, shape, _strides(shape))
    return tensor
