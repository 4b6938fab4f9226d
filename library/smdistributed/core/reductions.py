"""Reductions of what a rank holds itself, by the compiled engine.

Dtypes and reductions have the names of `native`. float16 and bfloat16 are combined in float32, and rounded once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Protocol

from smdistributed.core import native
from smdistributed.core.flat import Flat

DTYPES = {name: number for number, name in enumerate(native.DTYPES)}
OPS = {name: number for number, name in enumerate(native.OPS)}


class Reductions(Protocol):
    """What this module offers, and another one may where there is no compiled engine."""

    def reduces(self, dtype: str, op: str) -> bool: ...
    def reduce(self, parts: Sequence[Flat], result: Flat, op: str) -> None: ...
    def divide(self, total: Flat, by: int) -> None: ...


def reduces(dtype: str, op: str) -> bool:
    """Whether there is such a reduction of such elements. Raises OSError where there is no compiled engine."""
    if dtype not in DTYPES or op not in OPS:
        return False
    return bool(native.load().reduces(DTYPES[dtype], OPS[op]))


def reduce(parts: Sequence[Flat], result: Flat, op: str) -> None:
    """Combine the parts, in their order, into `result`, which may be one of them; averages of integers towards zero."""
    sources = pointers([part.address for part in parts])
    native.load().reduce(result.address, None, sources, len(parts), result.count, DTYPES[result.dtype], OPS[op])


def divide(total: Flat, by: int) -> None:
    """Divide in place; integers towards zero, as NCCL does."""
    native.load().divide(total.address, by, total.count, DTYPES[total.dtype])


def pointers(addresses: Sequence[int]) -> ctypes.Array[ctypes.c_void_p]:
    """The addresses as the compiled engine takes several."""
    return (ctypes.c_void_p * len(addresses))(*addresses)
