"""A gradient tape that reduces gradients over the ranks, and the check of arguments that optimizers have too."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from smdistributed.core.options import only_known
from smdistributed.dataparallel.exceptions import SMDDPError
from smdistributed.dataparallel.reduce_op import ReduceOp
from smdistributed.dataparallel.tensorflow.collectives import Compression, parse_reduce_op, reduce_tensors


class DistributedGradientTape(tf.GradientTape):  # type: ignore[misc]
    """Wraps a tape, and reduces the gradients that it returns over the ranks (AWS developer guide, 1.x).

    Args:
        gradtape: The tape. If it is persistent, all ranks must ask it for gradients equally often.
        device_dense, device_sparse: Only "".
        compression: A member of `Compression`.
        sparse_as_dense: Only True: tf.IndexedSlices become dense. (AWS's library accepted False until 1.2.1.)
        op: A `ReduceOp`, or its name.

    Raises:
        SMDDPError: For other values.
        TypeError: For an unknown argument.
    """

    @only_known
    def __init__(
        self,
        gradtape: tf.GradientTape,
        device_dense: str = "",
        device_sparse: str = "",
        compression: Any = Compression.none,
        sparse_as_dense: bool = True,
        op: ReduceOp | str = ReduceOp.AVERAGE,
    ) -> None:
        reject_unsupported(device_dense, device_sparse, sparse_as_dense)
        self._wrapped, self._compression, self._op = gradtape, compression, parse_reduce_op(op)

    def gradient(self, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        """Returns reduced gradients. None stays None; tf.IndexedSlices become dense."""
        found = self._wrapped.gradient(target, sources, *args, **kwargs)
        flat = tf.nest.flatten(found)
        return tf.nest.pack_sequence_as(found, reduce_tensors(flat, self._compression, self._op))

    def __enter__(self) -> DistributedGradientTape:
        self._wrapped.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._wrapped.__exit__(*error)

    def __getattribute__(self, name: str) -> Any:
        """Everything else is the wrapped tape's."""
        own = name.startswith("__") or name in ("gradient", "_wrapped", "_compression", "_op")
        return object.__getattribute__(self, name) if own else getattr(self._wrapped, name)


def reject_unsupported(device_dense: str, device_sparse: str, sparse_as_dense: bool) -> None:
    if device_dense or device_sparse:
        raise SMDDPError("device_dense and device_sparse are not supported. Fix: leave them out.")
    if not sparse_as_dense:
        raise SMDDPError("sparse_as_dense=False is not supported: sparse gradients are reduced as dense ones.")
