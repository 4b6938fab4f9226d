"""Flat tensors: contiguous elements at an address, which communication engines take from any framework.

Also allocates their memory, and computes with their elements.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

from smdistributed.core import native
from smdistributed.core.diagnostics import CollectiveError
from smdistributed.core.native import DTYPE_NUMBERS, ITEM_BYTES, OP_NUMBERS

_new_bytearray = ctypes.pythonapi.PyByteArray_FromStringAndSize
_new_bytearray.restype, _new_bytearray.argtypes = ctypes.py_object, (ctypes.c_char_p, ctypes.c_ssize_t)
_address_of = ctypes.pythonapi.PyByteArray_AsString
_address_of.restype, _address_of.argtypes = ctypes.c_void_p, (ctypes.py_object,)


class Flat(NamedTuple):
    """Contiguous elements in memory, without a shape.

    Attributes:
        dtype: A name of `native.DTYPES`; uint8 stands for bytes of any other type.
        owner: The object that holds the memory; None if the caller keeps it alive.
    """

    address: int
    count: int  # type: ignore[assignment]  # a tuple's own counts its fields
    dtype: str
    owner: object = None

    @property
    def bytes(self) -> int:
        return self.count * ITEM_BYTES[self.dtype]

    def cut(self, first: int, last: int) -> Flat:
        """Returns the elements from index `first` up to and without `last`; they share this memory."""
        return Flat(self.address + first * ITEM_BYTES[self.dtype], last - first, self.dtype, self.owner)

    def split(self, length: int) -> list[Flat]:
        """Returns consecutive parts of `length` elements each, all views of this memory; the last may be shorter."""
        return [self.cut(first, min(first + length, self.count)) for first in range(0, self.count, length)]

    def chunk(self, parts: int) -> list[Flat]:
        """Returns `parts` consecutive views of equal length; a remainder belongs to none of them."""
        length = self.count // parts
        return [self.cut(part * length, (part + 1) * length) for part in range(parts)]

    def as_bytes(self) -> Flat:
        """Returns the same memory, not a copy, as uint8 elements."""
        return Flat(self.address, self.bytes, "uint8", self.owner)

    def copy_from(self, other: Flat) -> None:
        """Copies another flat tensor's elements into this one. Raises CollectiveError if the sizes differ."""
        if self.bytes != other.bytes:
            raise CollectiveError(f"A rank sends itself {other.bytes} bytes, but expects {self.bytes}.")
        ctypes.memmove(self.address, other.address, self.bytes)

    def clone(self) -> Flat:
        copy = allocate(self.count, self.dtype)
        copy.copy_from(self)
        return copy


def allocate(count: int, dtype: str) -> Flat:
    """Allocates uninitialized memory. A bytearray(n) would be filled with zeros, which takes as long as a copy."""
    memory = _new_bytearray(None, count * ITEM_BYTES[dtype])
    return Flat(_address_of(memory), count, dtype, memory)


def reduce(parts: Sequence[Flat], result: Flat, op: str) -> None:
    """Combines the elements of `parts`, in their order, into `result`, all of one length and dtype. It may be a part.

    float16 and bfloat16 are combined in float32 and rounded once. Averages of integers are rounded towards zero.
    """
    sources = native.pointer_array([part.address for part in parts])
    dtype, number = DTYPE_NUMBERS[result.dtype], OP_NUMBERS[op]
    native.load().reduce(result.address, None, sources, len(parts), result.count, dtype, number)


def divide(total: Flat, by: int) -> None:
    """Divides all elements by `by`, in place; integers are rounded towards zero, as NCCL does."""
    native.load().divide(total.address, by, total.count, DTYPE_NUMBERS[total.dtype])


def compress(values: Flat, lost: Flat) -> Flat:
    """Returns `values` + `lost` (float32) as a message of int8, about 0.254 times their bytes.

    `lost` then has the rounding errors. Values that are not finite arrive as NaN, with their block of 256.
    """
    message = allocate(native.load().compressed_bytes(values.count), "uint8")
    native.load().compress(values.address, lost.address, message.address, values.count)
    return message


def decompress(message: Flat, values: Flat, add: bool = False) -> None:
    """Reads a message of `compress` into `values`, or adds it to them."""
    native.load().decompress(message.address, values.address, values.count, add)
