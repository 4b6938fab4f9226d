"""The functions of Horovod that model parallel scripts call: collectives over the replicas of this rank's stage.

Use `from smdistributed.modelparallel.tensorflow import horovod as hvd` in place of `import horovod.tensorflow as hvd`.
Optimizers average gradients over replicas themselves (see `smp.init`): averaging them here first changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from smdistributed.core.options import only_known
from smdistributed.core.tensorflow import operations
from smdistributed.modelparallel.backend.api import dp_rank as rank
from smdistributed.modelparallel.backend.api import dp_size as size
from smdistributed.modelparallel.backend.api import local_rank, local_size
from smdistributed.modelparallel.backend.exceptions import SMPConfigError
from smdistributed.modelparallel.tensorflow.state_mod import state

__all__ = ["Average", "Sum", "allreduce", "broadcast", "broadcast_variables", "init", "is_initialized", "local_rank"]
__all__ += ["local_size", "rank", "size"]

Average, Sum = "average", "sum"


def init() -> None:
    """Does nothing: `smp.init` has connected the ranks."""


def is_initialized() -> bool:
    """Whether `smp.init` was called."""
    return state.initialized


@only_known
def allreduce(tensor: Any, average: bool | None = None, op: str | None = None, name: str | None = None) -> Any:
    """Reduces a tensor over the replicas.

    Args:
        tensor: Any shape and any number dtype.
        average: True for the mean and False for the sum, in place of `op`.
        op: Average (the default) or Sum, or its name.
        name: Of the result in a graph.

    Returns:
        A tensor of the same shape and dtype, equal on all replicas.

    Raises:
        SMPConfigError: For another `op`, and for `op` together with `average`.
        TypeError: For an unknown argument.
    """
    if average is not None and op is not None:
        raise SMPConfigError(f"average={average} and op={op!r} say the same thing twice. Fix: leave average out.")
    wanted = (Sum if average is False else Average) if op is None else op.lower()
    if wanted not in (Average, Sum):
        raise SMPConfigError(f"op={op!r} is not a reduction of replicas. Fix: use Average or Sum.")
    found = tf.convert_to_tensor(tensor)
    if state.replicas is not None:
        (found,) = operations.all_reduce([found], "avg" if wanted == Average else "sum")
    return found if name is None else tf.identity(found, name=name)


def broadcast(tensor: Any, root_rank: int) -> Any:
    """Returns the tensor of one replica on all replicas; the tensor itself if there is one replica.

    Args:
        tensor: Any shape and dtype, the same on all replicas.
        root_rank: The replica, from 0.
    """
    if state.replicas is None:
        return tf.convert_to_tensor(tensor)
    return operations.broadcast([tf.convert_to_tensor(tensor)], root_rank)[0]


def broadcast_variables(variables: Iterable[Any], root_rank: int) -> None:
    """Sets variables to their values on one replica; all replicas call it.

    Args:
        variables: The same ones on all replicas, in the same order.
        root_rank: The replica, from 0.
    """
    for variable in variables:
        variable.assign(broadcast(variable.read_value(), root_rank))
