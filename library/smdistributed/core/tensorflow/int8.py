"""int8 for the gradients of a model: the rounding errors of earlier steps, and the trial whether it pays.

An all_reduce in int8 carries the number of these in the name of its reduction, and the number of its bucket. So steps
that TensorFlow traces again go on with the same errors.
"""

from __future__ import annotations

import ctypes
import itertools
from weakref import WeakValueDictionary

from smdistributed.core.compression import CompressionTrial
from smdistributed.core.flat import Flat, allocate

_MARK = " int8 "
_numbers = itertools.count()


class Int8Gradients:
    """State of a model's gradients in int8, from step to step. It is freed with its last reference.

    Args:
        measure: If False, all steps are compressed.

    Attributes:
        trial: Whether a step is compressed.
    """

    def __init__(self, measure: bool) -> None:
        self.trial = CompressionTrial("int8", measure)
        self._number = next(_numbers)
        self._lost: dict[tuple[int, int, int], Flat] = {}
        _by_number[self._number] = self

    def name_reduction(self, op: str, bucket: int) -> str:
        """Returns the name of a reduction, "sum" or "avg", for a bucket. `find_int8` reads it."""
        return f"{op}{_MARK}{self._number} {bucket}"

    def lost(self, bucket: int, part: int, count: int) -> Flat:
        """Returns the float32 errors of a part of a bucket; zeros at first, and if its length has changed."""
        key = bucket, part, count
        if key not in self._lost:
            zeros = self._lost[key] = allocate(count, "float32")
            ctypes.memset(zeros.address, 0, zeros.bytes)
        return self._lost[key]


_by_number: WeakValueDictionary[int, Int8Gradients] = WeakValueDictionary()


def find_int8(reduction: str) -> tuple[str, Int8Gradients | None, int]:
    """Returns the operation of a reduction's name. If it is in int8, also the gradients and the bucket."""
    op, is_int8, rest = reduction.partition(_MARK)
    if not is_int8:
        return op, None, 0
    number, bucket = map(int, rest.split())
    return op, _by_number[number], bucket
