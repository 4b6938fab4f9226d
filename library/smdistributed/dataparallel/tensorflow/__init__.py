"""Data parallel training in TensorFlow, customarily imported `as sdp` or `as dist` (AWS developer guide, 1.x).

Every function works in eager code, inside `tf.function` and in graphs of version 1. Collectives run in the order of the
program, which must be the same on all ranks; tensors on a GPU pass through the host's memory.
"""

import smdistributed.core.tensorflow  # noqa: F401 (says what to do where it is not installed)
from smdistributed.dataparallel.reduce_op import ReduceOp
from smdistributed.dataparallel.tensorflow.collectives import (
    allreduce,
    broadcast,
    broadcast_global_variables,
    broadcast_variables,
    oob_allreduce,
    overlap,
)
from smdistributed.dataparallel.tensorflow.compression import Compression
from smdistributed.dataparallel.tensorflow.gathering import allgather, alltoall, barrier, broadcast_object, join
from smdistributed.dataparallel.tensorflow.gradients import DistributedGradientTape
from smdistributed.dataparallel.tensorflow.hooks import BroadcastGlobalVariablesHook
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
from smdistributed.dataparallel.tensorflow.optimizer import DistributedOptimizer

Average, Sum, Min, Max = ReduceOp.AVERAGE, ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX  # Horovod's names
get_rank, get_world_size, get_local_rank = rank, size, local_rank  # other libraries look for these

__all__ = [
    "Average",
    "BroadcastGlobalVariablesHook",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "Max",
    "Min",
    "ReduceOp",
    "Sum",
    "SyncBatchNormalization",
    "allgather",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_variables",
    "get_local_rank",
    "get_rank",
    "get_world_size",
    "init",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "oob_allreduce",
    "overlap",
    "rank",
    "shutdown",
    "size",
]
