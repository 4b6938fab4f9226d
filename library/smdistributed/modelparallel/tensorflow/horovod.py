"""What scripts for this library call of Horovod, which is not needed: collectives of this rank's replicas.

`from smdistributed.modelparallel.tensorflow import horovod as hvd` in place of `import horovod.tensorflow as hvd`.
Optimizers average gradients themselves where there are replicas (`smp.init`): to do it here first changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from smdistributed.core.tensorflow import operations
from smdistributed.modelparallel.backend.api import dp_rank as rank
from smdistributed.modelparallel.backend.api import dp_size as size
from smdistributed.modelparallel.backend.api import local_rank, local_size
from smdistributed.modelparallel.tensorflow.state_mod import state

__all__ = ["allreduce", "broadcast", "broadcast_variables", "init", "local_rank", "local_size", "rank", "size"]


def init() -> None:
    """Nothing: `smp.init` has done it."""


def allreduce(tensor: Any, average: bool = True) -> Any:
    """The mean, or the sum, of the replicas' tensors."""
    if state.replicas is None:
        return tf.convert_to_tensor(tensor)
    return operations.all_reduce([tf.convert_to_tensor(tensor)], "avg" if average else "sum")[0]


def broadcast(tensor: Any, root_rank: int) -> Any:
    """That replica's tensor."""
    if state.replicas is None:
        return tf.convert_to_tensor(tensor)
    return operations.broadcast([tf.convert_to_tensor(tensor)], root_rank)[0]


def broadcast_variables(variables: Iterable[Any], root_rank: int) -> None:
    """Set variables to their values on that replica."""
    for variable in variables:
        variable.assign(broadcast(variable.read_value(), root_rank))
