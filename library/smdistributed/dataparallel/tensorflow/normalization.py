"""Batch normalization over the batches of all ranks."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow.python.saved_model.save_context import in_save_context

from smdistributed.core.tensorflow.keras_release import is_keras_3
from smdistributed.dataparallel.exceptions import SMDDPError
from smdistributed.dataparallel.reduce_op import ReduceOp
from smdistributed.dataparallel.tensorflow.collectives import reduce_tensors
from smdistributed.dataparallel.tensorflow.compression import Compression


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
        super().__init__(*args, **({} if is_keras_3() else {"fused": False}), **options)

    def _calculate_mean_and_var(self, inputs: Any, reduction_axes: Any, keep_dims: bool, mask: Any = None) -> Any:
        """Stands for the method of Keras 2. A SavedModel, without collectives, gets Keras' own."""
        if in_save_context():
            return super()._calculate_mean_and_var(inputs, reduction_axes, keep_dims, mask)
        return self._reduce_moments(inputs, list(reduction_axes), keep_dims, mask)

    def _moments(self, inputs: Any, *args: Any, **options: Any) -> Any:
        """Stands for the method of Keras 3, which gets a mask. Keras 2 has another, which calls the method above."""
        if in_save_context() or not is_keras_3():
            return super()._moments(inputs, *args, **options)
        return self._reduce_moments(inputs, list(self._reduction_axes), False, *args, **options)

    def _reduce_moments(self, inputs: Any, axes: list[int], keep_dims: bool, mask: Any) -> Any:
        """Returns mean and variance of all ranks' unmasked elements."""
        weights = tf.ones_like(inputs)
        if mask is not None:
            weights *= tf.cast(mask, inputs.dtype)[..., tf.newaxis]
        count, total = self._sums([tf.reduce_sum(weights, axes, True), tf.reduce_sum(inputs * weights, axes, True)])
        count = tf.maximum(count, 1)
        mean = total / count
        (squares,) = self._sums([tf.reduce_sum(tf.square(inputs - mean) * weights, axes, True)])
        found = mean, squares / count
        return found if keep_dims else tuple(tf.squeeze(value, axes) for value in found)

    def _sums(self, tensors: list[Any]) -> list[Any]:
        return reduce_tensors(tensors, Compression.none, ReduceOp.SUM)
