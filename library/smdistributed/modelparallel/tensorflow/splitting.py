"""What TensorFlow adds to splitting and merging (`backend.splitting`): its tensors, and StepOutput."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from smdistributed.modelparallel.backend import splitting
from smdistributed.modelparallel.backend.exceptions import SMPConfigError

_METHODS = ("variable", "add_n", "accumulate_n")


class StepOutput:
    """What a function under `smp.step` returned: a tensor for each microbatch, or tf.IndexedSlices (AWS API).

    `outputs` is the list of them, in the order of the microbatches.
    """

    def __init__(self, outputs: Sequence[Any]) -> None:
        self.outputs = list(outputs)

    def reduce_mean(self) -> Any:
        """Their mean, of the shape of each."""
        return _scaled(self.reduce_sum(), 1 / len(self.outputs))

    def reduce_sum(self) -> Any:
        """Their sum, of the shape of each."""
        first = self.outputs[0]
        if isinstance(first, tf.IndexedSlices):
            values = tf.concat([output.values for output in self.outputs], 0)
            return tf.IndexedSlices(values, tf.concat([o.indices for o in self.outputs], 0), first.dense_shape)
        total = first  # one after the other, so that each can be given back as soon as it is in the sum
        for output in self.outputs[1:]:
            total = total + output
        return total

    def accumulate(self, method: str = "variable", var: Any = None) -> Any:
        """Their mean, as `reduce_mean`: the sum is made as they come, whatever the method.

        var: a variable that is set to it.

        Raises SMPConfigError for a method that is none of "variable", "add_n" and "accumulate_n".
        """
        if method not in _METHODS:
            raise SMPConfigError(f"accumulate(method={method!r}): it must be one of {', '.join(map(repr, _METHODS))}.")
        mean = self.reduce_mean()
        return mean if var is None else var.assign(mean)

    def concat(self) -> Any:
        """All, one after the other along axis 0; scalars as a vector."""
        return tf.concat([tf.reshape(o, [1]) if o.shape.rank == 0 else o for o in self.outputs], 0)

    def merge(self) -> Any:
        """The whole batch, as `concat`."""
        return self.concat()

    def stack(self) -> Any:
        """All, along a new axis 0."""
        return tf.stack(self.outputs)

    def __repr__(self) -> str:
        return f"StepOutput({self.outputs!r})"


class Splitter(splitting.Splitter):
    """Of TensorFlow's tensors, in a graph: an axis whose size is not known there is split when it is."""

    may_be_uneven = False

    def is_tensor(self, value: Any) -> bool:
        return bool(tf.is_tensor(value))

    def shape(self, tensor: Any) -> tuple[int, ...]:
        return tuple(tensor.shape)

    def cut(self, tensor: Any, count: int, axis: int) -> list[Any]:
        parts: list[Any] = tf.split(tensor, count, axis)
        return parts

    def _split_tensor(self, name: str, value: Any, count: int, axis: int) -> list[Any]:
        if value.shape.rank and -value.shape.rank <= axis < value.shape.rank and value.shape[axis] is None:
            complaint = f"{name} has along axis {axis} what is no multiple of 'microbatches', {count}."
            with tf.control_dependencies([tf.debugging.assert_equal(tf.shape(value)[axis] % count, 0, complaint)]):
                return self.cut(tf.identity(value), count, axis)
        return super()._split_tensor(name, value, count, axis)


def merge(results: Sequence[Any]) -> Any:
    """What the microbatches returned as one: StepOutput in place of tensors, lists in place of anything else."""
    return splitting.merge(results, tf.is_tensor, StepOutput)


def _scaled(tensor: Any, factor: float) -> Any:
    if isinstance(tensor, tf.IndexedSlices):
        return tf.IndexedSlices(_scaled(tensor.values, factor), tensor.indices, tensor.dense_shape)
    return tensor * tf.cast(factor, tensor.dtype) if tensor.dtype.is_floating else tf.cast(tensor, tf.float32) * factor
