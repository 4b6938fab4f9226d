"""Horovod's functions for Keras (`horovod.tensorflow.keras`), for scripts with `tf.keras.Model.fit`.

Its callbacks and `load_model` are the same as in `smdistributed.dataparallel.tensorflow.keras`.
"""

from __future__ import annotations

from typing import Any

from smdistributed.core.options import only_known
from smdistributed.dataparallel.reduce_op import ReduceOp
from smdistributed.dataparallel.tensorflow import horovod
from smdistributed.dataparallel.tensorflow.horovod import (
    Average,
    Compression,
    Max,
    Min,
    Sum,
    allgather,
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
from smdistributed.dataparallel.tensorflow.keras import callbacks, load_model

__all__ = ["Average", "Compression", "DistributedOptimizer", "Max", "Min", "Sum", "allgather", "allreduce", "barrier"]
__all__ += ["broadcast", "broadcast_object", "broadcast_variables", "callbacks", "init", "is_initialized", "load_model"]
__all__ += ["local_rank", "local_size", "rank", "shutdown", "size"]


@only_known
def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: ReduceOp | str | None = None,
    compression: Any = Compression.none,
) -> Any:
    """Returns a tensor: the value reduced over the ranks. Arguments and errors are as in `horovod.allreduce`."""
    given = locals()
    return horovod.allreduce(given.pop("value"), **given)


@only_known
def DistributedOptimizer(  # noqa: N802 (the published name)
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: ReduceOp | str = ReduceOp.AVERAGE,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
) -> Any:
    """Makes a Keras optimizer apply the gradients of all ranks.

    Arguments and errors are as in `horovod.DistributedOptimizer`. `average_aggregated_gradients` has no effect:
    every step has one backward pass.
    """
    given = locals()
    del given["average_aggregated_gradients"]
    return horovod.DistributedOptimizer(**given)
