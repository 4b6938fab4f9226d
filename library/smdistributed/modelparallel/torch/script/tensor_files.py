"""Files of tensors in the format of safetensors, written without copies and read in parts.

A file begins with the length of a JSON header in 8 bytes. The header says where the bytes of each tensor are. Its
metadata says which tensors are parts of larger ones, and where. The format is documented at
https://huggingface.co/docs/safetensors. A header may come from a stranger: it decides only which bytes are read.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from smdistributed.modelparallel.backend.exceptions import SMPRuntimeError
from smdistributed.modelparallel.torch.script.checkpoint_files import new_file

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_MOST_HEADER = 100_000_000  # bytes, as in the library safetensors
_PARTS = "parts"


@dataclass(frozen=True)
class Region:
    """Where a tensor stands in a larger one: its first element on each axis, its shape, and the shape of the larger."""

    start: tuple[int, ...]
    shape: tuple[int, ...]
    whole: tuple[int, ...]

    @classmethod
    def of_whole(cls, shape: Iterable[int]) -> Region:
        found = tuple(shape)
        return cls((0,) * len(found), found, found)

    @property
    def is_part(self) -> bool:
        return self.shape != self.whole


@dataclass(frozen=True)
class _Piece:
    """A tensor in a file, from byte `offset` on."""

    file: Path
    dtype: torch.dtype
    region: Region
    offset: int


def write_tensors(path: Path, tensors: Mapping[str, tuple[torch.Tensor, Region]]) -> None:
    """Writes tensors with their regions. The file appears when it is complete and on disk.

    A tensor on a GPU, or with gaps, is copied while it is written. Raises SMPRuntimeError for other dtypes.
    """
    header: dict[str, Any] = {}
    end, parts = 0, {}
    for name, (tensor, region) in tensors.items():
        if tensor.dtype not in _NAMES:
            raise SMPRuntimeError(
                f"{name} has dtype {tensor.dtype}, which a partial checkpoint cannot hold. Allowed: "
                f"{', '.join(str(dtype) for dtype in _NAMES)}. Fix: save it with partial=False."
            )
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": region.shape, "data_offsets": (begin, end)}
        if region.is_part:
            parts[name] = (region.start, region.whole)
    header["__metadata__"] = {_PARTS: json.dumps(parts)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with new_file(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor, _ in tensors.values():
            there = tensor.detach().cpu().contiguous()
            file.write(_bytes_of(there))


class TensorFiles:
    """The tensors of several files, by name. Opens the files and reads their headers."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._pieces: dict[str, list[_Piece]] = {}
        for path in paths:
            for name, piece in _read_header(path):
                self._pieces.setdefault(name, []).append(piece)

    def __iter__(self) -> Iterator[str]:
        return iter(self._pieces)

    def __len__(self) -> int:
        return len(self._pieces)

    def __contains__(self, name: str) -> bool:
        return name in self._pieces

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        return self._pieces[name][0].region.whole

    def dtype(self, name: str) -> torch.dtype:
        return self._pieces[name][0].dtype

    def read(self, name: str, target: torch.Tensor, region: Region) -> None:
        """Reads one region of a tensor into `target`, which has the shape of the region, and no other bytes.

        Raises SMPRuntimeError if files lack a part of it, several have the same one, or a file is damaged.
        """
        pieces = self._pieces[name]
        if len({piece.region for piece in pieces}) < len(pieces):  # as many elements, and others may be missing
            raise SMPRuntimeError(
                f"{pieces[0].file.parent} has the same part of {name} in several files. Fix: remove files of other "
                "checkpoints."
            )
        count = sum(_read_overlap(piece, target, region) for piece in pieces)
        if count != math.prod(region.shape):
            raise SMPRuntimeError(
                f"{pieces[0].file.parent} has {count} of the {math.prod(region.shape)} elements of {name} "
                "that this rank needs. Fix: copy the files of all hosts there."
            )

    def read_bytes(self, name: str) -> list[tuple[Path, bytes]]:
        """Returns the bytes of the tensors of this name in all files, with their files."""
        found = []
        for piece in self._pieces.get(name, ()):
            buffer = torch.empty(piece.region.shape, dtype=piece.dtype)
            _read_overlap(piece, buffer, piece.region)
            found.append((piece.file, bytes(_bytes_of(buffer))))
        return found


def _read_overlap(piece: _Piece, target: torch.Tensor, region: Region) -> int:
    """Reads the common elements of a piece and a region into `target`. Returns their number."""
    if piece.region.whole != region.whole:
        return 0
    low = [max(own, other) for own, other in zip(piece.region.start, region.start)]
    ends = [(a + m, b + n) for a, m, b, n in zip(piece.region.start, piece.region.shape, region.start, region.shape)]
    sizes = [min(end) - begin for end, begin in zip(ends, low)]
    if any(size <= 0 for size in sizes):
        return 0
    place = target[tuple(slice(at - own, at - own + size) for at, own, size in zip(low, region.start, sizes))]
    is_direct = place.is_contiguous() and place.dtype == piece.dtype and place.device.type == "cpu"
    buffer = place if is_direct else torch.empty(sizes, dtype=piece.dtype)
    _read_runs(piece, [at - own for at, own in zip(low, piece.region.start)], buffer)
    if not is_direct:
        place.copy_(buffer)
    return math.prod(sizes)


def _read_runs(piece: _Piece, begin: list[int], buffer: torch.Tensor) -> None:
    """Fills a contiguous buffer with the elements from `begin` on. One run of bytes has the axes that are whole."""
    shape, sizes = piece.region.shape, buffer.shape
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    split = max((axis for axis in range(len(shape)) if sizes[axis] != shape[axis]), default=0)
    run = math.prod(sizes[split:]) * buffer.element_size()
    first = sum(at * stride for at, stride in zip(begin, strides))
    view = _bytes_of(buffer)
    with piece.file.open("rb", buffering=0) as file:
        for number, index in enumerate(itertools.product(*map(range, sizes[:split]))):
            at = first + sum(place * stride for place, stride in zip(index, strides))
            _fill(file.fileno(), view[number * run : (number + 1) * run], piece, at * buffer.element_size())


def _fill(descriptor: int, view: memoryview, piece: _Piece, at: int) -> None:
    while view:
        count = os.preadv(descriptor, [view], piece.offset + at)
        if count == 0:
            raise damaged(piece.file, "it ends too early")
        view, at = view[count:], at + count


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU, which the caller keeps alive."""
    count = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_ubyte * count).from_address(tensor.data_ptr())) if count else memoryview(b"")


def _read_header(path: Path) -> list[tuple[str, _Piece]]:
    """Returns the tensors of a file. Raises SMPRuntimeError if the header is damaged or leads outside of the file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(_MOST_HEADER, size - 8):
            raise damaged(path, "its header is too long")
        text = file.read(length)
    try:
        header: dict[str, Any] = json.loads(text)
        parts = json.loads(header.pop("__metadata__", {}).get(_PARTS, "{}"))
        return [(name, _piece(path, 8 + length, size, entry, parts.get(name))) for name, entry in header.items()]
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise damaged(path, str(error) or type(error).__name__) from error


def _piece(path: Path, data: int, size: int, entry: Mapping[str, Any], part: Any) -> _Piece:
    """Raises an error of Python if an entry is not one of a header."""
    dtype, shape, (begin, end) = _DTYPES[entry["dtype"]], tuple(entry["shape"]), entry["data_offsets"]
    region = Region.of_whole(shape) if part is None else Region(tuple(part[0]), shape, tuple(part[1]))
    numbers = (*region.start, *region.shape, *region.whole, begin, end)
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError("a shape or an offset is not a number")
    fits = all(at + own <= most for at, own, most in zip(region.start, region.shape, region.whole))
    if not fits or {len(region.start), len(region.whole)} != {len(shape)}:
        raise ValueError("a part is larger than the whole")
    if end - begin != math.prod(shape) * _itemsize(dtype) or data + end > size:
        raise ValueError("a tensor has other bytes than its shape says")
    return _Piece(path, dtype, region, data + begin)


def _itemsize(dtype: torch.dtype) -> int:
    return torch.empty(0, dtype=dtype).element_size()


def damaged(path: Path, problem: str) -> SMPRuntimeError:
    """The error that says how a file of a checkpoint is damaged."""
    return SMPRuntimeError(f"{path} is damaged ({problem}). Fix: resume from another checkpoint.")
