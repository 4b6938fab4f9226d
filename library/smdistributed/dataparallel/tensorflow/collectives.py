"""Collectives of tensors, of nested structures of them, and of variables."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from smdistributed.core.options import only_known, warn_without_effect
from smdistributed.core.tensorflow import operations
from smdistributed.dataparallel.exceptions import SMDDPError
from smdistributed.dataparallel.reduce_op import ReduceOp
from smdistributed.dataparallel.tensorflow.compression import Compression
from smdistributed.dataparallel.tensorflow.job import require

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
    """Return a gradient combined over the ranks (AWS API; `average` and `name` are Horovod's).

    Args:
        tensor: Any shape and any number dtype; tf.IndexedSlices become dense, None stays None.
        param_index: No effect, and a warning: AWS's library buckets by it; here a tensor that comes alone is reduced
            alone.
        num_params: As param_index.
        compression: A member of `Compression`.
        op: A `ReduceOp`, or its name; AVERAGE by default.
        grad: In place of `tensor`, as published scripts call it.
        average: True for AVERAGE and False for SUM, in place of `op`.
        name: Of the result in a graph.

    Raises:
        SMDDPError: Before `init`, for an `op` that is none, or together with `average`, and when the ranks call
            different collectives; inside a `tf.function` the last is tf.errors.InternalError with the same text.
        TypeError: For an argument that there is not.
    """
    if param_index is not None or num_params is not None:
        warn_without_effect("allreduce(param_index=, num_params=)", "each tensor is reduced when it is ready")
    given = tensor if tensor is not None else grad
    if given is None:
        return None
    (result,) = reduce_tensors([given], compression, _op_of(op, average))
    return result if name is None else tf.identity(result, name=name)


@only_known
def oob_allreduce(tensor: Any, compression: Any = Compression.none, op: ReduceOp | str = ReduceOp.AVERAGE) -> Any:
    """Return a tensor, or a list, tuple or dict of them, combined over the ranks: losses, metrics, counts.

    Numbers are taken as tensors. Raises as `allreduce` does.
    """
    flat = [tf.convert_to_tensor(item) for item in tf.nest.flatten(tensor)]
    return tf.nest.pack_sequence_as(tensor, reduce_tensors(flat, compression, op))


@only_known
def broadcast(tensor: Any, root_rank: int, name: str | None = None) -> Any:
    """Return that rank's tensor, on every rank. Raises SMDDPError where there is no such rank.

    name: of the result in a graph, as Horovod has it.
    """
    (result,) = broadcast_tensors([tf.convert_to_tensor(tensor)], root_rank)
    return result if name is None else tf.identity(result, name=name)


@only_known
def broadcast_variables(variables: Iterable[Any], root_rank: int) -> Any:
    """Set variables to their values on that rank, on all of them; in a graph of version 1, the operation that does.

    Raises SMDDPError where there is no such rank.
    """
    found = list(variables)
    values = broadcast_tensors([variable.read_value() for variable in found], root_rank)
    done = [variable.assign(value) for variable, value in zip(found, values)]
    return None if tf.executing_eagerly() or tf.inside_function() else tf.group(*done)


@only_known
def broadcast_global_variables(root_rank: int) -> Any:
    """The same for all global variables of a graph of version 1; eager code has none, and passes them itself."""
    if tf.executing_eagerly():
        raise SMDDPError("Eager code has no global variables: call broadcast_variables(model.variables, root_rank).")
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


def overlap(tensor: Any) -> Any:
    """Return what was given, a tensor or a layer, and warn: reductions overlap with the gradients of earlier layers
    without it."""
    warn_without_effect("overlap()", "reductions overlap with the gradients of earlier layers without it")
    return tensor


def reduce_tensors(
    tensors: Sequence[Any], compression: Any, op: ReduceOp | str, bucket_bytes: int = BUCKET_MB << 20
) -> list[Any]:
    """Combine tensors over the ranks, in buckets of one dtype, of which each is an operation.

    None stays None, tf.IndexedSlices become dense. The last tensors go first: their gradients are computed first.
    """
    reduction = _OPS[op_of(op)]
    require()
    results: list[Any] = [None] * len(tensors)
    compressed = {
        index: compression.compress(_summable(tensors[index]))
        for index in reversed(range(len(tensors)))
        if tensors[index] is not None
    }
    for bucket in _buckets({index: tensor for index, (tensor, _) in compressed.items()}, bucket_bytes):
        reduced = _told(operations.all_reduce, [compressed[index][0] for index in bucket], reduction)
        for index, tensor in zip(bucket, reduced):
            results[index] = compression.decompress(tensor, compressed[index][1])
    return results


def op_of(op: ReduceOp | str) -> ReduceOp:
    """The reduction of that name, in letters of any case. Raises SMDDPError where there is none."""
    try:
        return ReduceOp(op.lower() if isinstance(op, str) else op)
    except ValueError:
        raise SMDDPError(
            f"op={op!r} is no reduction: use ReduceOp.AVERAGE, SUM, MIN or MAX, or one of these names."
        ) from None


def _op_of(op: ReduceOp | str | None, average: bool | None) -> ReduceOp:
    if average is None:
        return ReduceOp.AVERAGE if op is None else op_of(op)
    if op is not None:
        raise SMDDPError(f"average={average} and op={op!r} say the same thing twice: leave average out.")
    return ReduceOp.AVERAGE if average else ReduceOp.SUM


def _summable(tensor: Any) -> Any:
    """As a dense tensor. Raises SMDDPError for truth values."""
    dense = tf.convert_to_tensor(tensor)
    if dense.dtype == tf.bool:
        raise SMDDPError("Truth values are not reduced: cast them, to tf.int32 for MIN (all) and MAX (any).")
    return dense


def broadcast_tensors(tensors: Sequence[Any], root_rank: int) -> list[Any]:
    """The tensors of that rank."""
    if not 0 <= root_rank < require():
        raise SMDDPError(f"root_rank={root_rank} is no rank: there are {require()}, from 0.")
    results: list[Any] = [None] * len(tensors)
    for bucket in _buckets(dict(enumerate(tensors)), BUCKET_MB << 20):
        for index, tensor in zip(bucket, _told(operations.broadcast, [tensors[i] for i in bucket], root_rank)):
            results[index] = tensor
    return results


def _buckets(tensors: dict[int, Any], bucket_bytes: int) -> list[list[int]]:
    """Which tensors go together, in their order; what has no size yet counts as nothing."""
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


def _told(collective: Any, tensors: list[Any], argument: Any) -> list[Any]:
    """What the collective gives. Raises SMDDPError with its reason."""
    try:
        found: list[Any] = collective(tensors, argument)
    except tf.errors.InternalError as error:
        raise SMDDPError(operations.reason_of(error)) from None
    return found
