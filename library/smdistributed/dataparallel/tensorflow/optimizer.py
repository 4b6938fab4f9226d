"""An optimizer that applies the gradients of all ranks."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from smdistributed.dataparallel.exceptions import SMDDPError
from smdistributed.dataparallel.reduce_op import ReduceOp
from smdistributed.dataparallel.tensorflow.collectives import BUCKET_MB, reduce_tensors
from smdistributed.dataparallel.tensorflow.compression import Compression
from smdistributed.dataparallel.tensorflow.gradients import refuse


def DistributedOptimizer(  # noqa: N802 (the published name)
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = True,
    op: ReduceOp = ReduceOp.AVERAGE,
    bucket_cap_mb: int = BUCKET_MB,
) -> Any:
    """Return the optimizer, which from now on combines gradients over the ranks before it applies them.

    optimizer: one of tf.keras.optimizers, tf.keras.optimizers.legacy or tf.compat.v1.train; it keeps its class's name
        and its state, so that a model saved with it loads without this library. A version 1 optimizer combines them in
        `compute_gradients`, the others in `apply_gradients` (not where that is told to skip the aggregation).
    name, use_locking: not used; published scripts pass them.

    Raises SMDDPError for anything else, and where a device is named.
    """
    refuse(device_dense, device_sparse, sparse_as_dense)

    def combined(gradients: list[Any]) -> list[Any]:
        return reduce_tensors(gradients, compression, op, bucket_cap_mb << 20)

    kind = type(optimizer)
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        methods: dict[str, Any] = _version_1(kind, combined)
    elif isinstance(optimizer, (tf.keras.optimizers.Optimizer, tf.keras.optimizers.legacy.Optimizer)):
        methods = _keras(kind, combined)
    else:
        raise SMDDPError(
            f"{kind.__module__}.{kind.__qualname__} is no optimizer of tf.keras.optimizers, of its `legacy`, or of "
            "tf.compat.v1.train: pass one of these."
        )
    about = {"__module__": kind.__module__, "__doc__": kind.__doc__, "__qualname__": kind.__qualname__}
    optimizer.__class__ = type(kind.__name__, (kind,), {**about, **methods})
    return optimizer


def _keras(kind: type, combined: Any) -> dict[str, Any]:
    def apply_gradients(self: Any, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        pairs = list(grads_and_vars)
        skipped = kwargs.get("skip_gradients_aggregation") or not kwargs.get("experimental_aggregate_gradients", True)
        if not skipped:
            pairs = list(zip(combined([gradient for gradient, _ in pairs]), [variable for _, variable in pairs]))
        return kind.apply_gradients(self, pairs, *args, **kwargs)  # type: ignore[attr-defined]

    return {"apply_gradients": apply_gradients}


def _version_1(kind: type, combined: Any) -> dict[str, Any]:
    def compute_gradients(self: Any, *args: Any, **kwargs: Any) -> list[Any]:
        pairs = kind.compute_gradients(self, *args, **kwargs)  # type: ignore[attr-defined]
        return list(zip(combined([gradient for gradient, _ in pairs]), [variable for _, variable in pairs]))

    return {"compute_gradients": compute_gradients}
