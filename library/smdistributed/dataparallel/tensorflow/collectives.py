"""Collectives of tensors, of nested structures of tensors, and of variables (AWS API).

Also the reductions and broadcasts in buckets on which tapes, optimizers and other collectives are built.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from smdistributed.core.options import only_known, warn_without_effect
from smdistributed.core.tensorflow import operations
from smdistributed.core.tensorflow.int8 import Int8Gradients
from smdistributed.dataparallel.exceptions import SMDDPError
from smdistributed.dataparallel.reduce_op import ReduceOp
from smdistributed.dataparallel.tensorflow.compression import Compression, is_int8
from smdistributed.dataparallel.tensorflow.job import require_size

BUCKET_MB = 25
_OPS = {ReduceOp.AVERAGE: "avg", ReduceOp.SUM: "sum", ReduceOp.MIN: "min", ReduceOp.MAX: "max"}


@only_known
def allreduce(
    tensor: Any = None,
    param_index: int | None = None,
    num_params: int | None = None,
    compression: Any = Compression.none,
    op: ReduceOp | str | None = None,
    grad: Any = None,
    average: bool | None = None,
    name: str | None = None,
) -> Any:
    """Reduces a gradient over the ranks (AWS API; `average` and `name` are Horovod's).

    Args:
        tensor: Any shape and any number dtype; tf.IndexedSlices become dense, None stays None.
        param_index, num_params: No effect, and a warning: AWS's library chooses buckets by them. Here it does not.
        compression: A member of `Compression` but int8, which is for gradients of variables.
        op: A `ReduceOp`, or its name; AVERAGE by default.
        grad: In place of `tensor`, as published scripts call it.
        average: True for AVERAGE and False for SUM, in place of `op`.
        name: Of the result in a graph.

    Returns:
        A dense tensor of the same shape and dtype, equal on all ranks.

    Raises:
        SMDDPError: Before `init`, for int8, an unknown `op`, `op` together with `average`, and if the ranks call
            different collectives. Inside a `tf.function` the last is tf.errors.InternalError with the same text.
        TypeError: For an unknown argument.
    """
    if param_index is not None or num_params is not None:
        warn_without_effect("allreduce(param_index=, num_params=)", "each tensor is reduced when it is ready")
    given = tensor if tensor is not None else grad
    if given is None:
        return None
    (result,) = reduce_tensors([given], compression, _choose_reduce_op(op, average))
    return result if name is None else tf.identity(result, name=name)


@only_known
def oob_allreduce(tensor: Any, compression: Any = Compression.none, op: ReduceOp | str = ReduceOp.AVERAGE) -> Any:
    """Reduces losses, metrics or counts over the ranks.

    Args:
        tensor: A tensor or number, or a nested list, tuple or dict of them; any shapes and number dtypes.
        compression: As in `allreduce`.
        op: A `ReduceOp`, or its name.

    Returns:
        The same structure with tensors that are equal on all ranks.

    Raises:
        SMDDPError: As `allreduce`.
    """
    flat = [tf.convert_to_tensor(item) for item in tf.nest.flatten(tensor)]
    return tf.nest.pack_sequence_as(tensor, reduce_tensors(flat, compression, op))


@only_known
def broadcast(tensor: Any, root_rank: int, name: str | None = None) -> Any:
    """Returns the tensor of one rank on all ranks.

    Args:
        tensor: Any shape and dtype, the same on all ranks.
        root_rank: The rank, from 0.
        name: Of the result in a graph, as in Horovod.

    Raises:
        SMDDPError: If there is no such rank; also as `allreduce`.
    """
    (result,) = broadcast_tensors([tf.convert_to_tensor(tensor)], root_rank)
    return result if name is None else tf.identity(result, name=name)


@only_known
def broadcast_variables(variables: Iterable[Any], root_rank: int) -> Any:
    """Sets variables to their values on one rank; all ranks call it.

    Args:
        variables: The same ones on all ranks, in the same order: of TensorFlow or of Keras.
        root_rank: The rank, from 0.

    Returns:
        In a graph of version 1, the operation that does so; else None.

    Raises:
        SMDDPError: As `broadcast`.
    """
    found = list(variables)
    values = broadcast_tensors([_read(variable) for variable in found], root_rank)
    done = [variable.assign(value) for variable, value in zip(found, values)]
    return None if tf.executing_eagerly() or tf.inside_function() else tf.group(*done)


def _read(variable: Any) -> Any:
    return variable.read_value() if hasattr(variable, "read_value") else tf.convert_to_tensor(variable)  # Keras 3's


@only_known
def broadcast_global_variables(root_rank: int) -> Any:
    """Sets all global variables of a graph of version 1: see `broadcast_variables`. Raises SMDDPError in eager code."""
    if tf.executing_eagerly():
        raise SMDDPError(
            "Eager code has no global variables. Fix: call broadcast_variables(model.variables, root_rank)."
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


def overlap(tensor: Any) -> Any:
    """Returns its argument, a tensor or layer, and warns: reductions always overlap with the backward pass."""
    warn_without_effect("overlap()", "reductions overlap with the gradients of earlier layers without it")
    return tensor


def reduce_tensors(
    tensors: Sequence[Any],
    compression: Any,
    op: ReduceOp | str,
    bucket_bytes: int = BUCKET_MB << 20,
    int8: Int8Gradients | None = None,
) -> list[Any]:
    """Reduces tensors over the ranks, in buckets of one dtype. The last tensors come first, as gradients do.

    Args:
        tensors: Any shapes and number dtypes; None stays None, tf.IndexedSlices become dense.
        compression, op: As in `allreduce`.
        bucket_bytes: The most bytes of a bucket.
        int8: The state of int8, which needs it.

    Returns:
        A tensor for each one, equal on all ranks.

    Raises:
        SMDDPError: As `allreduce`.
    """
    if is_int8(compression) and int8 is None:
        raise SMDDPError(
            "Compression.int8 keeps the rounding errors of a model's gradients for its next step. A tensor has no next "
            "step. Fix: pass it to DistributedGradientTape or DistributedOptimizer; here, pass fp16, bf16 or none."
        )
    reduction = _OPS[parse_reduce_op(op)]
    require_size()
    results: list[Any] = [None] * len(tensors)
    compressed = {
        index: compression.compress(_as_dense(tensors[index]))
        for index in reversed(range(len(tensors)))
        if tensors[index] is not None
    }
    numbers = itertools.count()
    for bucket in _buckets({index: tensor for index, (tensor, _) in compressed.items()}, bucket_bytes):
        sent = [compressed[index][0] for index in bucket]
        in_int8 = int8 if sent[0].dtype == tf.float32 else None
        name = in_int8.name_reduction(reduction, next(numbers)) if in_int8 else reduction
        for index, tensor in zip(bucket, _run_collective(operations.all_reduce, sent, name)):
            results[index] = compression.decompress(tensor, compressed[index][1])
    return results


def parse_reduce_op(op: ReduceOp | str) -> ReduceOp:
    try:
        return ReduceOp(op.lower() if isinstance(op, str) else op)
    except ValueError:
        raise SMDDPError(
            f"op={op!r} is not a reduction. Fix: use ReduceOp.AVERAGE, SUM, MIN or MAX, or one of these names."
        ) from None


def _choose_reduce_op(op: ReduceOp | str | None, average: bool | None) -> ReduceOp:
    """Returns the reduction: AVERAGE if neither is given. Raises SMDDPError if both are, and for an unknown name."""
    if average is None:
        return ReduceOp.AVERAGE if op is None else parse_reduce_op(op)
    if op is not None:
        raise SMDDPError(f"average={average} and op={op!r} say the same thing twice. Fix: leave average out.")
    return ReduceOp.AVERAGE if average else ReduceOp.SUM


def _as_dense(tensor: Any) -> Any:
    dense = tf.convert_to_tensor(tensor)
    if dense.dtype == tf.bool:
        raise SMDDPError("Truth values are not reduced. Fix: cast them, to tf.int32 for MIN (all) and MAX (any).")
    return dense


def broadcast_tensors(tensors: Sequence[Any], root_rank: int) -> list[Any]:
    """Returns the root's tensors, sent in buckets; the given ones stay. Raises SMDDPError as `broadcast` does."""
    if not 0 <= root_rank < require_size():
        raise SMDDPError(
            f"root_rank={root_rank} is not a rank. Allowed: 0 to {require_size() - 1}. Fix: name one of these."
        )
    results: list[Any] = [None] * len(tensors)
    for bucket in _buckets(dict(enumerate(tensors)), BUCKET_MB << 20):
        for index, tensor in zip(
            bucket, _run_collective(operations.broadcast, [tensors[i] for i in bucket], root_rank)
        ):
            results[index] = tensor
    return results


def _buckets(tensors: dict[int, Any], bucket_bytes: int) -> list[list[int]]:
    """Groups tensors into buckets by dtype, in their order. A tensor of unknown size counts as 0 bytes."""
    open_buckets: dict[Any, list[int]] = {}
    filled: dict[Any, int] = defaultdict(int)
    buckets: list[list[int]] = []
    for index, tensor in tensors.items():
        bytes_ = (tensor.shape.num_elements() or 0) * tensor.dtype.size
        if tensor.dtype not in open_buckets or filled[tensor.dtype] + bytes_ > bucket_bytes:
            buckets.append([])
            open_buckets[tensor.dtype], filled[tensor.dtype] = buckets[-1], 0
        open_buckets[tensor.dtype].append(index)
        filled[tensor.dtype] += bytes_
    return buckets


def _run_collective(collective: Any, tensors: list[Any], argument: Any) -> list[Any]:
    """Returns the results of a collective. In eager code raises SMDDPError with its reason."""
    try:
        found: list[Any] = collective(tensors, argument)
    except tf.errors.InternalError as error:
        raise SMDDPError(operations.failure_reason(error)) from None
    return found


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]
    """Sets all global variables to the values of one rank, after a session has initialized or restored them.

    Args:
        root_rank: The rank, from 0.
    """

    def __init__(self, root_rank: int) -> None:
        self._root_rank = root_rank
        self._broadcast: Any = None

    def begin(self) -> None:
        self._broadcast = broadcast_global_variables(self._root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:
        session.run(self._broadcast)
