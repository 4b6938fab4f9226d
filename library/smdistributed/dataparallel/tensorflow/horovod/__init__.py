"""The functions of Horovod that data parallel scripts call, on this library: for scripts written for Horovod.

`from smdistributed.dataparallel.tensorflow import horovod as hvd` in place of `import horovod.tensorflow as hvd`. A
rehearsal needs not even that. What is not here is refused by Python: AttributeError, or TypeError for an argument.
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
from smdistributed.dataparallel.tensorflow.hooks import (
    BroadcastGlobalVariablesHook as _BroadcastGlobalVariablesHook,
)

__all__ = [
    "Average",
    "BroadcastGlobalVariablesHook",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "Max",
    "Min",
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
    "init",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "rank",
    "shutdown",
    "size",
]


def init() -> None:
    """Join the job, unless that was done before."""
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
    """Return a tensor combined over the ranks, as this package's `allreduce`.

    prescale_factor, postscale_factor: the tensor is multiplied by them, before and after.

    Raises SMDDPError where a device is named, and as this package's `allreduce` does.
    """
    _refuse_devices(device_dense, device_sparse)
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
    """Return a tape whose gradients are those of all ranks.

    sparse_as_dense: both values give dense gradients, of the same numbers.

    Raises SMDDPError where a device is named.
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
    """Return the optimizer, which from now on applies the gradients of all ranks. Raises as that of this package.

    sparse_as_dense: both values give dense gradients, of the same numbers.
    """
    return sdp.DistributedOptimizer(
        optimizer,
        name=name,
        use_locking=use_locking,
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=compression,
        backward_passes_per_step=backward_passes_per_step,
        op=op,
    )


class BroadcastGlobalVariablesHook(_BroadcastGlobalVariablesHook):
    """Sets all global variables to those of a rank, when a session has initialised or restored them."""

    def __init__(self, root_rank: int, device: str = "") -> None:
        _refuse_devices(device)
        super().__init__(root_rank)


def _refuse_devices(*devices: str) -> None:
    if any(devices):
        raise SMDDPError("Devices for collectives are not supported: leave device_dense, device_sparse and device out.")
