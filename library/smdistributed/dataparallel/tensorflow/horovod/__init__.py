"""Horovod's functions for TensorFlow, for scripts that are written for Horovod.

Use `from smdistributed.dataparallel.tensorflow import horovod as hvd` in place of `import horovod.tensorflow as hvd`.
In a rehearsal scripts stay unchanged. Other functions raise AttributeError, unknown arguments TypeError.
"""

from __future__ import annotations

from typing import Any

from smdistributed.core.options import only_known
from smdistributed.dataparallel import tensorflow as sdp
from smdistributed.dataparallel.exceptions import SMDDPError
from smdistributed.dataparallel.reduce_op import ReduceOp
from smdistributed.dataparallel.tensorflow import (
    Average,
    Compression,
    Max,
    Min,
    Sum,
    SyncBatchNormalization,
    allgather,
    alltoall,
    barrier,
    broadcast,
    broadcast_global_variables,
    broadcast_object,
    broadcast_variables,
    is_initialized,
    join,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
)
from smdistributed.dataparallel.tensorflow.collectives import (
    BroadcastGlobalVariablesHook as _BroadcastGlobalVariablesHook,
)

__all__ = ["Average", "BroadcastGlobalVariablesHook", "Compression", "DistributedGradientTape", "DistributedOptimizer"]
__all__ += ["Max", "Min", "Sum", "SyncBatchNormalization", "allgather", "allreduce", "alltoall", "barrier", "broadcast"]
__all__ += ["broadcast_global_variables", "broadcast_object", "broadcast_variables", "init", "is_initialized", "join"]
__all__ += ["local_rank", "local_size", "rank", "shutdown", "size"]


def init() -> None:
    """Joins the job, and gives TensorFlow only this rank's GPU, if this process has not joined the job yet.

    Raises the errors of `smdistributed.dataparallel.tensorflow.init`, and SMDDPError after `shutdown`.
    """
    if not is_initialized():
        sdp.init()


@only_known
def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: ReduceOp | str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
) -> Any:
    """Reduces a tensor over the ranks, as `smdistributed.dataparallel.tensorflow.allreduce`.

    Args:
        tensor: Any shape and any number dtype.
        average: True for the mean and False for the sum, in place of `op`.
        device_dense, device_sparse: Only "".
        compression: A member of `Compression`.
        op: A `ReduceOp`, or its name.
        prescale_factor, postscale_factor: Multiply the tensor before the reduction, and the result.
        name: Of the result in a graph.

    Raises:
        SMDDPError: For a device; also as that function.
    """
    _reject_devices(device_dense, device_sparse)
    given = tensor if prescale_factor == 1.0 else tensor * prescale_factor
    found = sdp.allreduce(given, compression=compression, op=op, average=average, name=name)
    return found if postscale_factor == 1.0 else found * postscale_factor


@only_known
def DistributedGradientTape(  # noqa: N802 (the published name)
    gradtape: Any,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: ReduceOp | str = ReduceOp.AVERAGE,
) -> Any:
    """Wraps a tape, and reduces its gradients over the ranks.

    Arguments and errors are as in `smdistributed.dataparallel.tensorflow.DistributedGradientTape`, except for
    `sparse_as_dense`: both values give dense gradients.
    """
    return sdp.DistributedGradientTape(gradtape, device_dense, device_sparse, compression, op=op)


@only_known
def DistributedOptimizer(  # noqa: N802 (the published name)
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: ReduceOp | str = ReduceOp.AVERAGE,
) -> Any:
    """Makes an optimizer apply the gradients of all ranks.

    Arguments and errors are as in `smdistributed.dataparallel.tensorflow.DistributedOptimizer`, except for
    `sparse_as_dense`: both values give dense gradients.
    """
    given = locals()
    del given["sparse_as_dense"]
    return sdp.DistributedOptimizer(**given)


class BroadcastGlobalVariablesHook(_BroadcastGlobalVariablesHook):
    """Sets all global variables to the values of one rank, after a session has initialized or restored them.

    Args:
        root_rank: The rank, from 0.
        device: Only "".
    """

    def __init__(self, root_rank: int, device: str = "") -> None:
        _reject_devices(device)
        super().__init__(root_rank)


def _reject_devices(*devices: str) -> None:
    if any(devices):
        raise SMDDPError(
            "Devices for collectives are not supported. Fix: leave device_dense, device_sparse and device out."
        )
