"""Tensors as the engines take them: contiguous elements at an address, whatever framework holds them."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

from smdistributed.core.diagnostics import CollectiveError
from smdistributed.core.native import ITEM_BYTES

_new_bytearray = ctypes.pythonapi.PyByteArray_FromStringAndSize
_new_bytearray.restype, _new_bytearray.argtypes = ctypes.py_object, (ctypes.c_char_p, ctypes.c_ssize_t)
_address_of = ctypes.pythonapi.PyByteArray_AsString
_address_of.restype, _address_of.argtypes = ctypes.c_void_p, (ctypes.py_object,)


class Flat(NamedTuple):
    """`count` elements side by side at `address`, of a dtype of `native.DTYPES`; bytes of any other kind are uint8.

    owner: what holds the memory, which lives as long as this and its parts do. None: whoever made this keeps it.
    """

    address: int
    count: int  # type: ignore[assignment]  # a tuple's own counts its fields
    dtype: str
    owner: object = None

    @property
    def bytes(self) -> int:
        """How many."""
        return self.count * ITEM_BYTES[self.dtype]

    def cut(self, first: int, last: int) -> Flat:
        """The elements from the first one on, up to the last one, which is not among them."""
        return Flat(self.address + first * ITEM_BYTES[self.dtype], last - first, self.dtype, self.owner)

    def split(self, length: int) -> list[Flat]:
        """Parts of so many elements, in a row; the last may have fewer."""
        return [self.cut(first, min(first + length, self.count)) for first in range(0, self.count, length)]

    def chunk(self, parts: int) -> list[Flat]:
        """So many parts of one length, in a row; what is left over is in none."""
        length = self.count // parts
        return [self.cut(part * length, (part + 1) * length) for part in range(parts)]

    def as_bytes(self) -> Flat:
        """The same memory."""
        return Flat(self.address, self.bytes, "uint8", self.owner)

    def copy_from(self, other: Flat) -> None:
        """Copy another one's elements into this one. Raises CollectiveError where the two differ in size."""
        if self.bytes != other.bytes:
            raise CollectiveError(f"A rank gives itself {other.bytes} bytes, where it expects {self.bytes}.")
        ctypes.memmove(self.address, other.address, self.bytes)

    def clone(self) -> Flat:
        """A copy of the elements."""
        copy = temporary(self.count, self.dtype)
        copy.copy_from(self)
        return copy


def temporary(count: int, dtype: str) -> Flat:
    """Memory for so many elements, which is given back when nobody holds it any more; what is in it is left to chance.

    A bytearray(n) would be all zeros, which takes as long as a copy does.
    """
    memory = _new_bytearray(None, count * ITEM_BYTES[dtype])
    return Flat(_address_of(memory), count, dtype, memory)
