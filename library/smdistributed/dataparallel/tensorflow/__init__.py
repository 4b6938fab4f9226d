"""Data parallel training in TensorFlow, usually imported `as sdp` or `as dist` (AWS developer guide, 1.x).

Collectives work in eager code, inside `tf.function` and in graphs of version 1. `broadcast_object` works only in eager
code, `broadcast_global_variables` only in such graphs; `join` always raises an error. All ranks must call the same
collectives in the same order. Tensors on a GPU are copied through host memory.
"""

import smdistributed.core.tensorflow  # noqa: F401 (says what to do where it is not installed)
from smdistributed.dataparallel.reduce_op import ReduceOp
from smdistributed.dataparallel.tensorflow.collectives import (
    BroadcastGlobalVariablesHook,
    allreduce,
    broadcast,
    broadcast_global_variables,
    broadcast_variables,
    oob_allreduce,
    overlap,
)
from smdistributed.dataparallel.tensorflow.compression import Compression
from smdistributed.dataparallel.tensorflow.gathering import allgather, alltoall, barrier, broadcast_object, join
from smdistributed.dataparallel.tensorflow.job import (
    init,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
)
from smdistributed.dataparallel.tensorflow.normalization import SyncBatchNormalization
from smdistributed.dataparallel.tensorflow.optimizer import DistributedGradientTape, DistributedOptimizer

Average, Sum, Min, Max = ReduceOp.AVERAGE, ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX  # Horovod's names
get_rank, get_world_size, get_local_rank = rank, size, local_rank  # other libraries look for these

__all__ = ["Average", "BroadcastGlobalVariablesHook", "Compression", "DistributedGradientTape", "DistributedOptimizer"]
__all__ += ["Max", "Min", "ReduceOp", "Sum", "SyncBatchNormalization", "allgather", "allreduce", "alltoall", "barrier"]
__all__ += ["broadcast", "broadcast_global_variables", "broadcast_object", "broadcast_variables", "get_local_rank"]
__all__ += ["get_rank", "get_world_size", "init", "is_initialized", "join", "local_rank", "local_size", "oob_allreduce"]
__all__ += ["overlap", "rank", "shutdown", "size"]
