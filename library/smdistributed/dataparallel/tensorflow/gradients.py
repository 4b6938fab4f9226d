"""Reduces the gradients of a model, step by step, with the compression that its tape or optimizer was given."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from smdistributed.core.compression import reason_without_network, warn_that_it_is_off
from smdistributed.core.tensorflow.int8 import Int8Gradients
from smdistributed.dataparallel.exceptions import SMDDPError
from smdistributed.dataparallel.reduce_op import ReduceOp
from smdistributed.dataparallel.tensorflow.collectives import BUCKET_MB, parse_reduce_op, reduce_tensors
from smdistributed.dataparallel.tensorflow.compression import Compression, is_int8
from smdistributed.dataparallel.tensorflow.job import engine, rank


class GradientReduction:
    """Reduces lists of gradients of one model over the ranks. With int8, it keeps the rounding errors.

    Args:
        compression: A member of `Compression`.
        op: A `ReduceOp`, or its name; with int8 AVERAGE or SUM.
        bucket_bytes: The most bytes that are reduced at once.

    Raises:
        SMDDPError: For another `op`.
    """

    def __init__(self, compression: Any, op: ReduceOp | str, bucket_bytes: int = BUCKET_MB << 20) -> None:
        self._compression, self._op, self._bucket_bytes = compression, parse_reduce_op(op), bucket_bytes
        self._int8: Int8Gradients | None = None
        if is_int8(compression) and self._op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
            raise SMDDPError(f"Compression.int8 has no {self._op.name}. Fix: use AVERAGE or SUM, or no int8.")

    def __call__(self, gradients: Sequence[Any]) -> list[Any]:
        """Returns the reduced gradients. None stays None. Raises SMDDPError as `allreduce` does."""
        if is_int8(self._compression) and self._int8 is None:
            self._start_int8()
        return reduce_tensors(gradients, self._compression, self._op, self._bucket_bytes, self._int8)

    def _start_int8(self) -> None:
        """Warns, once, if there is nothing to compress, and then uses no compression."""
        without = reason_without_network(engine())
        if without:
            warn_that_it_is_off(f"int8 is off: {without}", rank())
            self._compression = Compression.none
        else:
            self._int8 = Int8Gradients(measure=self._compression is Compression.int8)


_of_variables: dict[tuple[Any, ...], GradientReduction] = {}


def find_reduction(sources: Sequence[Any], compression: Any, op: ReduceOp | str) -> GradientReduction:
    """Returns the reduction for a tape's sources. With int8 it is the one of the last step: only the tape is new.

    Raises SMDDPError if a source is not a variable, with int8.
    """
    if not is_int8(compression):
        return GradientReduction(compression, op)
    if not all(hasattr(source, "assign") for source in sources):
        raise SMDDPError(
            "Compression.int8 keeps rounding errors for the next step, by variable. A source of gradient() is "
            "not a variable. Fix: pass variables, or use another compression."
        )
    key = (compression, op, *map(id, sources))
    if key not in _of_variables:
        _of_variables[key] = GradientReduction(compression, op)
        if sources:
            weakref.finalize(sources[0], _of_variables.pop, key, None).atexit = False
    return _of_variables[key]
