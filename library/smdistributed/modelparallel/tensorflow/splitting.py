"""Splits batches of TensorFlow tensors into microbatches, and merges what these return (see `backend.splitting`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from smdistributed.modelparallel.backend import splitting
from smdistributed.modelparallel.backend.exceptions import SMPConfigError

_METHODS = ("variable", "add_n", "accumulate_n")


class StepOutput:
    """A result of a function under `smp.step`: one tensor, or tf.IndexedSlices, for each microbatch (AWS API).

    `outputs` lists them in the order of the microbatches.
    """

    def __init__(self, outputs: Sequence[Any]) -> None:
        self.outputs = list(outputs)

    def reduce_mean(self) -> Any:
        """Returns the mean of the outputs, in their shape; float32 if their dtype is an integer."""
        return _scaled(self.reduce_sum(), 1 / len(self.outputs))

    def reduce_sum(self) -> Any:
        """Returns the sum of the outputs, in their shape and dtype; tf.IndexedSlices are concatenated."""
        first = self.outputs[0]
        if isinstance(first, tf.IndexedSlices):
            values = tf.concat([output.values for output in self.outputs], 0)
            return tf.IndexedSlices(values, tf.concat([o.indices for o in self.outputs], 0), first.dense_shape)
        total = first  # one by one, so that each can be freed as soon as it is in the sum
        for output in self.outputs[1:]:
            total = total + output
        return total

    def accumulate(self, method: str = "variable", var: Any = None) -> Any:
        """Returns the mean of the outputs, as `reduce_mean`.

        Args:
            method: "variable", "add_n" or "accumulate_n": all give the same result.
            var: A variable to assign the mean to.

        Returns:
            The mean; with `var`, the result of the assignment.

        Raises:
            SMPConfigError: For another method.
        """
        if method not in _METHODS:
            raise SMPConfigError(
                f"accumulate(method={method!r}) is unknown. Allowed: {', '.join(map(repr, _METHODS))}."
            )
        mean = self.reduce_mean()
        return mean if var is None else var.assign(mean)

    def concat(self) -> Any:
        """Returns the outputs concatenated along axis 0; scalars become a vector."""
        return tf.concat([tf.reshape(o, [1]) if o.shape.rank == 0 else o for o in self.outputs], 0)

    def merge(self) -> Any:
        """Returns the whole batch, as `concat`."""
        return self.concat()

    def stack(self) -> Any:
        """Returns the outputs stacked along a new axis 0."""
        return tf.stack(self.outputs)

    def __repr__(self) -> str:
        return f"StepOutput({self.outputs!r})"


class TensorFlowSplitter(splitting.ArgumentSplitter):
    """Splits symbolic tensors. The size of an axis that is unknown is checked when the graph runs."""

    may_be_uneven = False

    def is_tensor(self, value: Any) -> bool:
        return bool(tf.is_tensor(value))

    def shape(self, tensor: Any) -> tuple[int, ...]:
        return tuple(tensor.shape)

    def cut(self, tensor: Any, count: int, axis: int) -> list[Any]:
        parts: list[Any] = tf.split(tensor, count, axis)
        return parts

    def _split_tensor(self, name: str, value: Any, count: int, axis: int) -> list[Any]:
        """Splits a tensor. If its size along the axis is unknown, the graph asserts that `count` divides it."""
        if value.shape.rank and -value.shape.rank <= axis < value.shape.rank and value.shape[axis] is None:
            complaint = f"{name} has a size along axis {axis} that is not a multiple of 'microbatches', {count}."
            with tf.control_dependencies([tf.debugging.assert_equal(tf.shape(value)[axis] % count, 0, complaint)]):
                return self.cut(tf.identity(value), count, axis)
        return super()._split_tensor(name, value, count, axis)


def merge(results: Sequence[Any]) -> Any:
    """Merges the results of all microbatches: tensors into StepOutputs, other values into lists."""
    return splitting.merge(results, tf.is_tensor, StepOutput)


def _scaled(tensor: Any, factor: float) -> Any:
    if isinstance(tensor, tf.IndexedSlices):
        return tf.IndexedSlices(_scaled(tensor.values, factor), tensor.indices, tensor.dense_shape)
    return tensor * tf.cast(factor, tensor.dtype) if tensor.dtype.is_floating else tf.cast(tensor, tf.float32) * factor
