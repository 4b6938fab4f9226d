"""A gradient tape whose gradients are those of all ranks."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from smdistributed.core.options import only_known
from smdistributed.dataparallel.exceptions import SMDDPError
from smdistributed.dataparallel.reduce_op import ReduceOp
from smdistributed.dataparallel.tensorflow.collectives import op_of, reduce_tensors
from smdistributed.dataparallel.tensorflow.compression import Compression


class DistributedGradientTape(tf.GradientTape):  # type: ignore[misc]
    """Wraps a tape: `gradient` returns what that tape's does, combined over the ranks (AWS developer guide, 1.x).

    A persistent tape may be asked several times, always by all ranks. Gradients that are None stay None, and
    tf.IndexedSlices become dense: sparse_as_dense=False, which AWS's library knew until 1.2.1, is refused.

    Raises SMDDPError where a device is named and for an `op` that is none, TypeError for an argument that there is not.
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
        refuse(device_dense, device_sparse, sparse_as_dense)
        self._wrapped, self._compression, self._op = gradtape, compression, op_of(op)

    def gradient(self, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        """As `tf.GradientTape.gradient`."""
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


def refuse(device_dense: str, device_sparse: str, sparse_as_dense: bool) -> None:
    """Raise SMDDPError for arguments that mean nothing here."""
    if device_dense or device_sparse:
        raise SMDDPError("device_dense and device_sparse are not supported: leave them out.")
    if not sparse_as_dense:
        raise SMDDPError("sparse_as_dense=False is not supported: sparse gradients are reduced as dense ones.")
