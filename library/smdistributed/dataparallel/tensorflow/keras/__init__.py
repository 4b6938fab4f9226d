"""Data parallel training with `tf.keras.Model.fit`: wrap the optimizer, and pass callbacks of `.callbacks`.

`load_model` continues with a saved model. Collectives and functions of the job are here too.
"""

from __future__ import annotations

import warnings
from typing import Any

import tensorflow as tf

from smdistributed.core.options import keyword_names, only_known, refuse_unknown
from smdistributed.core.tensorflow.keras_release import is_keras_3
from smdistributed.dataparallel.tensorflow import (
    Average,
    Compression,
    Max,
    Min,
    Sum,
    allgather,
    allreduce,
    barrier,
    broadcast,
    broadcast_object,
    broadcast_variables,
    init,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
)
from smdistributed.dataparallel.tensorflow import DistributedOptimizer as _DistributedOptimizer
from smdistributed.dataparallel.tensorflow.keras import callbacks

__all__ = ["Average", "Compression", "DistributedOptimizer", "Max", "Min", "Sum", "allgather", "allreduce", "barrier"]
__all__ += ["broadcast", "broadcast_object", "broadcast_variables", "callbacks", "init", "is_initialized", "load_model"]
__all__ += ["local_rank", "local_size", "rank", "shutdown", "size"]


def DistributedOptimizer(opt: Any, compression: Any = Compression.none, **kwargs: Any) -> Any:  # noqa: N802
    """Makes a Keras optimizer apply the gradients of all ranks.

    Args:
        opt: The optimizer.
        compression: A member of `Compression`.
        kwargs: As for `smdistributed.dataparallel.tensorflow.DistributedOptimizer`, which also tells the errors.

    Returns:
        The same optimizer.
    """
    refuse_unknown("DistributedOptimizer", kwargs, ("opt", *keyword_names(_DistributedOptimizer)))
    return _DistributedOptimizer(opt, compression=compression, **kwargs)


@only_known
def load_model(filepath: Any, custom_objects: Any = None, compression: Any = Compression.none) -> Any:
    """Loads a saved model, and makes its optimizer apply the gradients of all ranks, to continue with `fit`.

    Args:
        filepath, custom_objects: As for tf.keras.models.load_model.
        compression: A member of `Compression`.

    Returns:
        The model. You get a UserWarning if it was saved without an optimizer.
    """
    model = tf.keras.models.load_model(filepath, custom_objects=custom_objects)
    if getattr(model, "optimizer", None) is None:
        warnings.warn(f"{filepath} was saved without an optimizer: compile the model with one.", stacklevel=2)
        return model
    _DistributedOptimizer(model.optimizer, compression=compression)
    if is_keras_3():
        model.jit_compile = False  # the file may say otherwise, and XLA cannot communicate
    return model
