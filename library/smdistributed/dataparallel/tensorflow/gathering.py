"""Collectives of Horovod that AWS's library lacks: for tensors of different sizes, objects, and a barrier.

They consist of reductions and broadcasts: each sends `size()` times as much as a reduction of the same tensor.
"""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import tensorflow as tf

from smdistributed.core.options import only_known
from smdistributed.core.secret import sign, verify
from smdistributed.dataparallel.exceptions import SMDDPError
from smdistributed.dataparallel.reduce_op import ReduceOp
from smdistributed.dataparallel.tensorflow.collectives import broadcast_tensors, oob_allreduce
from smdistributed.dataparallel.tensorflow.job import rank, require_size

_OBJECTS = "objects"  # the purpose of the key of their tags


@only_known
def allgather(tensor: Any, name: str | None = None) -> Any:
    """Concatenates the tensors of all ranks along axis 0, in rank order. Only floating-point tensors have a gradient.

    Args:
        tensor: Any dtype; one axis or more. Only the first one may differ between the ranks.
        name: Of the result in a graph.

    Returns:
        A tensor, equal on all ranks. Its gradient is the sum of all ranks' gradients of this rank's part.

    Raises:
        SMDDPError: For a scalar, before `init`, and when the ranks call different collectives.
    """
    given = tf.convert_to_tensor(tensor)
    if given.shape.rank == 0:
        raise SMDDPError("allgather() puts tensors one after the other. Fix: pass a scalar as tf.reshape(tensor, [1]).")
    lengths = _lengths(given)
    gathered = _differentiable(given, lengths) if given.dtype.is_floating else _all_parts(given, lengths)
    return gathered if name is None else tf.identity(gathered, name=name)


@only_known
def alltoall(tensor: Any, splits: Any = None, name: str | None = None) -> Any:
    """Sends a part of a tensor to every rank, and concatenates the parts that this rank receives along axis 0.

    Args:
        tensor: Any dtype; one axis or more. Its parts along axis 0 are for the ranks, in their order.
        splits: The length of each part, one for each rank; without it all are equally long.
        name: Of the result in a graph.

    Returns:
        A tensor; with `splits` also an int64 tensor of the lengths of the parts from each rank.

    Raises:
        SMDDPError: For a scalar, and before `init`.
        tf.errors.InvalidArgumentError: If the parts do not add up to the tensor.
    """
    given, size = tf.convert_to_tensor(tensor), require_size()
    length = tf.shape(given, tf.int64)[0]
    mine = tf.fill([size], length // size) if splits is None else tf.cast(splits, tf.int64)
    what = f"alltoall(): the parts for {size} ranks must add up to the first axis; pass `splits` if they differ"
    with tf.control_dependencies([tf.debugging.assert_equal(tf.reduce_sum(mine), length, what)]):
        mine = tf.reshape(mine, [1, size])
    table = allgather(mine)  # from, to
    begins = tf.cumsum(tf.reduce_sum(table, 1), exclusive=True) + tf.reduce_sum(table[:, : rank()], 1)
    received, everything = table[:, rank()], allgather(given)
    parts = [everything[begins[source] : begins[source] + received[source]] for source in range(size)]
    result = tf.concat(parts, 0, name=name or "alltoall")
    return result if splits is None else (result, received)


@only_known
def broadcast_object(obj: Any, root_rank: int = 0) -> Any:
    """Returns the object of one rank on all ranks. Only in eager code. That rank gets its object itself, not a copy.

    Args:
        obj: Any object that can be pickled.
        root_rank: The rank, from 0.

    Raises:
        SMDDPError: Before `init`, inside a `tf.function`, or if there is no such rank. Also, if the job has a secret
            and the object was changed on its way.
    """
    if not tf.executing_eagerly():
        raise SMDDPError("broadcast_object() needs values. Fix: call it outside of tf.function, and in eager code.")
    data = np.zeros(0, np.uint8)
    if rank() == root_rank:
        data = np.frombuffer(sign(pickle.dumps(obj), _OBJECTS), np.uint8)
    (length,) = broadcast_tensors([tf.constant(len(data), tf.int64)], root_rank)
    given = tf.constant(data) if rank() == root_rank else tf.zeros([int(length)], tf.uint8)
    (found,) = broadcast_tensors([given], root_rank)
    if rank() == root_rank:
        return obj
    try:
        pickled = verify(found.numpy().tobytes(), _OBJECTS)
    except ValueError as error:
        raise SMDDPError(f"broadcast_object(): the object of rank {root_rank} {error}.") from error
    return pickle.loads(pickled)


def barrier() -> Any:
    """Waits until all ranks have called this. In a graph of version 1, returns the operation that waits."""
    done = oob_allreduce(tf.zeros([1]), op=ReduceOp.SUM)
    return None if tf.executing_eagerly() or tf.inside_function() else done.op


def join() -> None:
    """Raises SMDDPError. (In Horovod it is for ranks that have fewer batches than others.)"""
    raise SMDDPError(
        "join() is not supported: all ranks must run as many steps. Fix: take the fewest, "
        "steps = int(oob_allreduce(steps, op=ReduceOp.MIN)), and dataset.take(steps) or fit(steps_per_epoch=steps)."
    )


def _lengths(given: Any) -> Any:
    mine = tf.one_hot(rank(), require_size(), tf.shape(given, tf.int64)[0], dtype=tf.int64)
    return oob_allreduce(mine, op=ReduceOp.SUM)


def _all_parts(given: Any, lengths: Any) -> Any:
    """Returns the tensors of all ranks, concatenated along the first axis: each rank broadcasts its own."""
    parts = []
    for root in range(require_size()):
        shape = tf.concat([lengths[root : root + 1], tf.shape(given, tf.int64)[1:]], 0)
        (part,) = broadcast_tensors([given if root == rank() else tf.zeros(shape, given.dtype)], root)
        parts.append(part)
    gathered = tf.concat(parts, 0)
    gathered.set_shape([None, *given.shape[1:]])
    return gathered


def _differentiable(given: Any, lengths: Any) -> Any:
    """Gathers with its own gradient: the gradient of the broadcasts would not reduce on all ranks."""

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def gathered(mine: Any) -> Any:
        def gradient(upstream: Any) -> Any:
            begin = tf.reduce_sum(lengths[: rank()])
            return oob_allreduce(upstream, op=ReduceOp.SUM)[begin : begin + lengths[rank()]]

        return _all_parts(mine, lengths), gradient

    return gathered(given)
