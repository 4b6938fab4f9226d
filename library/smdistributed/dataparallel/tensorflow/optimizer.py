"""Makes an optimizer apply, and a gradient tape return, the gradients of all ranks."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from smdistributed.core.options import only_known, warn_without_effect
from smdistributed.core.tensorflow.keras_release import is_keras_3
from smdistributed.dataparallel.exceptions import SMDDPError
from smdistributed.dataparallel.reduce_op import ReduceOp
from smdistributed.dataparallel.tensorflow import keras_3
from smdistributed.dataparallel.tensorflow.collectives import BUCKET_MB, parse_reduce_op
from smdistributed.dataparallel.tensorflow.compression import Compression
from smdistributed.dataparallel.tensorflow.gradients import GradientReduction, find_reduction


class DistributedGradientTape(tf.GradientTape):  # type: ignore[misc]
    """Wraps a tape, and reduces the gradients that it returns over the ranks (AWS developer guide, 1.x).

    Args:
        gradtape: The tape. If it is persistent, all ranks must ask it for gradients equally often.
        device_dense, device_sparse: Only "".
        compression: A member of `Compression`.
        sparse_as_dense: Only True: tf.IndexedSlices become dense. (AWS's library accepted False until 1.2.1.)
        op: A `ReduceOp`, or its name.

    Raises:
        SMDDPError: For other values.
        TypeError: For an unknown argument.
    """

    @only_known
    def __init__(
        self,
        gradtape: tf.GradientTape,
        device_dense: str = "",
        device_sparse: str = "",
        compression: Any = Compression.none,
        sparse_as_dense: bool = True,
        op: ReduceOp | str = ReduceOp.AVERAGE,
    ) -> None:
        reject_unsupported(device_dense, device_sparse, sparse_as_dense)
        self._wrapped, self._compression, self._op = gradtape, compression, parse_reduce_op(op)

    def gradient(self, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        """Returns reduced gradients. None stays None; tf.IndexedSlices become dense."""
        found = self._wrapped.gradient(target, sources, *args, **kwargs)
        reduce = find_reduction(tf.nest.flatten(sources), self._compression, self._op)
        return tf.nest.pack_sequence_as(found, reduce(tf.nest.flatten(found)))

    def __enter__(self) -> DistributedGradientTape:
        self._wrapped.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._wrapped.__exit__(*error)

    def __getattribute__(self, name: str) -> Any:
        """Everything else is the wrapped tape's."""
        own = name.startswith("__") or name in ("gradient", "_wrapped", "_compression", "_op")
        return object.__getattribute__(self, name) if own else getattr(self._wrapped, name)


def reject_unsupported(device_dense: str, device_sparse: str, sparse_as_dense: bool) -> None:
    if device_dense or device_sparse:
        raise SMDDPError("device_dense and device_sparse are not supported. Fix: leave them out.")
    if not sparse_as_dense:
        raise SMDDPError("sparse_as_dense=False is not supported: sparse gradients become dense. Fix: leave it out.")


_MARK = "_smddp_combines"


@only_known
def DistributedOptimizer(  # noqa: N802 (the published name)
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = True,
    op: ReduceOp | str = ReduceOp.AVERAGE,
    bucket_cap_mb: int = BUCKET_MB,
    backward_passes_per_step: int = 1,
) -> Any:
    """Makes an optimizer reduce gradients over the ranks before it applies them.

    A version 1 optimizer reduces them in `compute_gradients`, the others when they are applied. With mixed precision
    this precedes the check for infinities, so that all ranks skip the same steps. With Keras 3, models that are
    compiled with the optimizer use no XLA, unless you pass `jit_compile=True`, which is then an error.

    Args:
        optimizer: An optimizer of tf.keras.optimizers, its `legacy` (Keras 2) or tf.compat.v1.train.
        name, use_locking: No effect, and a warning: the optimizer keeps its name.
        device_dense, device_sparse: Only "".
        compression: A member of `Compression`.
        sparse_as_dense: Only True: sparse gradients become dense.
        op: A `ReduceOp`, or its name.
        bucket_cap_mb: The most MiB that are reduced at once.
        backward_passes_per_step: For Horovod's scripts; only 1.

    Returns:
        The same optimizer. It keeps the name of its class and its state: a saved model loads without this library.

    Raises:
        SMDDPError: For another kind of optimizer, one that was wrapped before, and other values of arguments.
        TypeError: For an unknown argument.
    """
    reject_unsupported(device_dense, device_sparse, sparse_as_dense)
    if backward_passes_per_step != 1:
        raise SMDDPError(
            f"backward_passes_per_step={backward_passes_per_step} is not supported. Fix: add up the gradients of that "
            "many batches in the training step, and call the optimizer's apply_gradients with the sums. Optimizers of "
            "Keras 3 average them: gradient_accumulation_steps."
        )
    if name is not None or use_locking:
        warn_without_effect("DistributedOptimizer(name=, use_locking=)", "the optimizer keeps its own")
    combined = GradientReduction(compression, op, bucket_cap_mb << 20)
    if is_keras_3() and isinstance(optimizer, tf.keras.optimizers.Optimizer):
        _refuse_second_wrap(keras_3.reduces(optimizer))
        keras_3.reduce_before_apply(optimizer, combined)
    else:
        # a LossScaleOptimizer aggregates with its inner one
        _replace_methods(getattr(optimizer, "inner_optimizer", optimizer), combined)
    return optimizer


def _refuse_second_wrap(wrapped: bool) -> None:
    if wrapped:
        raise SMDDPError("DistributedOptimizer was given this optimizer before. Fix: wrap it once.")


def _replace_methods(optimizer: Any, combined: Any) -> None:
    """Gives an optimizer of version 1 or Keras 2 a class that combines."""
    kind = type(optimizer)
    _refuse_second_wrap(getattr(optimizer, _MARK, False))
    keras = tf.keras.optimizers
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        methods: dict[str, Any] = {"compute_gradients": _combining(kind.compute_gradients, combined)}
    elif not is_keras_3() and isinstance(optimizer, (keras.Optimizer, keras.legacy.Optimizer)):
        methods = dict.fromkeys(("aggregate_gradients", "_aggregate_gradients"), _combining(_pairs, combined))
    else:
        raise SMDDPError(
            f"{kind.__module__}.{kind.__qualname__} is no optimizer of tf.keras.optimizers, of its `legacy`, or of "
            "tf.compat.v1.train. Fix: pass one of these."
        )
    about = {"__module__": kind.__module__, "__doc__": kind.__doc__, "__qualname__": kind.__qualname__, _MARK: True}
    optimizer.__class__ = type(kind.__name__, (kind,), {**about, **methods})


def _pairs(_: Any, grads_and_vars: Any) -> Any:
    return grads_and_vars


def _combining(real: Any, combined: Any) -> Any:
    """Returns a method that combines the gradients in the pairs of `real`. `combined` takes and returns a list."""

    def method(self: Any, *args: Any, **kwargs: Any) -> list[Any]:
        pairs = list(real(self, *args, **kwargs))
        return list(zip(combined([gradient for gradient, _ in pairs]), [variable for _, variable in pairs]))

    return method
