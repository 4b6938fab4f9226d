"""Batch normalization over the batches of all ranks."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow.python.saved_model.save_context import in_save_context

from smdistributed.dataparallel.exceptions import SMDDPError
from smdistributed.dataparallel.reduce_op import ReduceOp
from smdistributed.dataparallel.tensorflow.collectives import Compression, reduce_tensors


@tf.keras.utils.register_keras_serializable("smdistributed")
class SyncBatchNormalization(tf.keras.layers.BatchNormalization):  # type: ignore[misc]
    """A tf.keras.layers.BatchNormalization that in training normalizes by the batches of all ranks.

    Keras' own layer normalizes by each rank's batch, so its moving averages differ between ranks. In a SavedModel the
    two are the same. (The name is Horovod's; AWS's library has no such layer.)

    Args:
        args, options: As for tf.keras.layers.BatchNormalization.
        fused: Only False or None.
        synchronized: Only False.

    Raises:
        SMDDPError: For `fused=True` and `synchronized=True`.
    """

    def __init__(self, *args: Any, fused: bool | None = False, synchronized: bool = False, **options: Any) -> None:
        if fused or synchronized:
            raise SMDDPError(
                "SyncBatchNormalization takes neither fused=True nor synchronized=True. Fix: leave them out."
            )
        super().__init__(*args, fused=False, **options)

    def _calculate_mean_and_var(self, inputs: Any, reduction_axes: Any, keep_dims: bool, mask: Any = None) -> Any:
        """Returns mean and variance of all ranks' unmasked elements. A SavedModel, without collectives, gets Keras'."""
        if in_save_context():
            return super()._calculate_mean_and_var(inputs, reduction_axes, keep_dims, mask)
        weights = tf.ones_like(inputs)
        if mask is not None:
            weights *= tf.cast(mask, inputs.dtype)[..., tf.newaxis]
        axes = list(reduction_axes)
        count, total = self._sums([tf.reduce_sum(weights, axes, True), tf.reduce_sum(inputs * weights, axes, True)])
        count = tf.maximum(count, 1)
        mean = total / count
        (squares,) = self._sums([tf.reduce_sum(tf.square(inputs - mean) * weights, axes, True)])
        found = mean, squares / count
        return found if keep_dims else tuple(tf.squeeze(value, axes) for value in found)

    def _sums(self, tensors: list[Any]) -> list[Any]:
        return reduce_tensors(tensors, Compression.none, ReduceOp.SUM)
