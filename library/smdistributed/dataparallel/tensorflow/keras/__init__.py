"""Data parallel training with `tf.keras.Model.fit`: wrap the optimizer, and pass the callbacks of `.callbacks`."""

from __future__ import annotations

from typing import Any

from smdistributed.dataparallel.tensorflow import (
    Compression,
    broadcast,
    broadcast_variables,
    init,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
)
from smdistributed.dataparallel.tensorflow import DistributedOptimizer as _DistributedOptimizer
from smdistributed.dataparallel.tensorflow.keras import callbacks

__all__ = [
    "Compression",
    "DistributedOptimizer",
    "broadcast",
    "broadcast_variables",
    "callbacks",
    "init",
    "local_rank",
    "local_size",
    "rank",
    "shutdown",
    "size",
]


def DistributedOptimizer(opt: Any, compression: Any = Compression.none, **kwargs: Any) -> Any:  # noqa: N802
    """Return the Keras optimizer, which from now on applies the gradients of all ranks."""
    return _DistributedOptimizer(opt, compression=compression, **kwargs)
