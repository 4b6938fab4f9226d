"""Data parallel training with `tf.keras.Model.fit`: wrap the optimizer, and pass the callbacks of `.callbacks`."""

from __future__ import annotations

import warnings
from typing import Any

import tensorflow as tf

from smdistributed.core.options import keyword_names, only_known, refuse_unknown
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

__all__ = [
    "Average",
    "Compression",
    "DistributedOptimizer",
    "Max",
    "Min",
    "Sum",
    "allgather",
    "allreduce",
    "barrier",
    "broadcast",
    "broadcast_object",
    "broadcast_variables",
    "callbacks",
    "init",
    "is_initialized",
    "load_model",
    "local_rank",
    "local_size",
    "rank",
    "shutdown",
    "size",
]


def DistributedOptimizer(opt: Any, compression: Any = Compression.none, **kwargs: Any) -> Any:  # noqa: N802
    """Return the Keras optimizer, which from now on applies the gradients of all ranks.

    kwargs: as the DistributedOptimizer of the package above takes them. Raises as it does.
    """
    refuse_unknown("DistributedOptimizer", kwargs, ("opt", *keyword_names(_DistributedOptimizer)))
    return _DistributedOptimizer(opt, compression=compression, **kwargs)


@only_known
def load_model(filepath: Any, custom_objects: Any = None, compression: Any = Compression.none) -> Any:
    """Return a saved model whose optimizer applies the gradients of all ranks again: to go on with `fit`.

    As tf.keras.models.load_model, whose models have a plain optimizer. A model that was saved without one gets none,
    and you get a warning (UserWarning).
    """
    model = tf.keras.models.load_model(filepath, custom_objects=custom_objects)
    if getattr(model, "optimizer", None) is None:
        warnings.warn(f"{filepath} was saved without an optimizer: compile the model with one.", stacklevel=2)
        return model
    _DistributedOptimizer(model.optimizer, compression=compression)
    return model
