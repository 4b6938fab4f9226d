"""Collectives of tensors, of nested structures of them, and of variables."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from smdistributed.core.tensorflow import operations
from smdistributed.dataparallel.exceptions import SMDDPError
from smdistributed.dataparallel.reduce_op import ReduceOp
from smdistributed.dataparallel.tensorflow.compression import Compression
from smdistributed.dataparallel.tensorflow.job import require

BUCKET_MB = 25
_OPS = {ReduceOp.AVERAGE: "avg", ReduceOp.SUM: "sum", ReduceOp.MIN: "min", ReduceOp.MAX: "max"}


def allreduce(
    tensor: Any = None,
    param_index: int | None = None,
    num_params: int | None = None,
    compression: Any = Compression.none,
    op: ReduceOp = ReduceOp.AVERAGE,
    grad: Any = None,
) -> Any:
    """Return a gradient combined over the ranks; published scripts also call it with `grad=` in place of `tensor=`.

    param_index, num_params: AWS's library buckets by them; here a tensor that comes alone is reduced alone.

    Raises SMDDPError before `init`, and when the ranks come apart; inside a `tf.function` the latter is
    tf.errors.InternalError with the same text.
    """
    given = tensor if tensor is not None else grad
    return None if given is None else reduce_tensors([given], compression, op)[0]


def oob_allreduce(tensor: Any, compression: Any = Compression.none, op: ReduceOp = ReduceOp.AVERAGE) -> Any:
    """Return a tensor, or a list, tuple or dict of them, combined over the ranks: losses, metrics, counts.

    Numbers are taken as tensors. Raises as `allreduce` does.
    """
    flat = [tf.convert_to_tensor(item) for item in tf.nest.flatten(tensor)]
    return tf.nest.pack_sequence_as(tensor, reduce_tensors(flat, compression, op))


def broadcast(tensor: Any, root_rank: int) -> Any:
    """Return that rank's tensor, on every rank. Raises SMDDPError where there is no such rank."""
    return broadcast_tensors([tf.convert_to_tensor(tensor)], root_rank)[0]


def broadcast_variables(variables: Iterable[Any], root_rank: int) -> Any:
    """Set variables to their values on that rank, on all of them; in a graph of version 1, the operation that does.

    Raises SMDDPError where there is no such rank.
    """
    found = list(variables)
    values = broadcast_tensors([variable.read_value() for variable in found], root_rank)
    done = [variable.assign(value) for variable, value in zip(found, values)]
    return None if tf.executing_eagerly() or tf.inside_function() else tf.group(*done)


def broadcast_global_variables(root_rank: int) -> Any:
    """The same for all global variables of a graph of version 1; eager code has none, and passes them itself."""
    if tf.executing_eagerly():
        raise SMDDPError("Eager code has no global variables: call broadcast_variables(model.variables, root_rank).")
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


def overlap(tensor: Any) -> Any:
    """Return what was given, a tensor or a layer: reductions overlap with the gradients of earlier layers anyway."""
    return tensor


def reduce_tensors(
    tensors: Sequence[Any], compression: Any, op: ReduceOp, bucket_bytes: int = BUCKET_MB << 20
) -> list[Any]:
    """Combine tensors over the ranks, in buckets of one dtype, of which each is an operation.

    None stays None, tf.IndexedSlices become dense. The last tensors go first: their gradients are computed first.
    """
    if op not in _OPS:
        raise SMDDPError(f"op={op!r} is no reduction: use ReduceOp.AVERAGE, SUM, MIN or MAX.")
    require()
    results: list[Any] = [None] * len(tensors)
    compressed = {
        index: compression.compress(_summable(tensors[index]))
        for index in reversed(range(len(tensors)))
        if tensors[index] is not None
    }
    for bucket in _buckets({index: tensor for index, (tensor, _) in compressed.items()}, bucket_bytes):
        reduced = _told(operations.all_reduce, [compressed[index][0] for index in bucket], _OPS[op])
        for index, tensor in zip(bucket, reduced):
            results[index] = compression.decompress(tensor, compressed[index][1])
    return results


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
