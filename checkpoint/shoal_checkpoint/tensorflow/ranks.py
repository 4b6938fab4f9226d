"""How the ranks of a TensorFlow training communicate: through the module that the script already uses.

Also shares the samples of a step between ranks, so that the steps are the same with any number of ranks.
"""

from __future__ import annotations

import json
from typing import Any, Callable

import tensorflow as tf

from shoal_checkpoint.directories import CheckpointError


class Ranks:
    """The ranks of a module with Horovod's functions. None: only this process. Each method is a collective call."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self.rank = 0 if module is None else int(module.rank())
        self.size = 1 if module is None else int(module.size())

    def gather(self, value: Any) -> list[Any]:
        """Returns the values of all ranks, in the order of ranks. They are of JSON's types. A collective call."""
        if self.size == 1:
            return [value]
        data = tf.io.decode_raw(json.dumps(value), tf.uint8)
        lengths = [int(each) for each in self._module.allgather(tf.constant([int(data.shape[0])]))]
        joined = bytes(self._module.allgather(data).numpy().tobytes())
        ends = [sum(lengths[: index + 1]) for index in range(len(lengths))]
        return [json.loads(joined[end - length : end]) for end, length in zip(ends, lengths)]

    def any(self, value: bool) -> bool:
        if self.size == 1:
            return value
        return bool(tf.reduce_any(self._module.allgather(tf.constant([int(value)])) > 0))

    def from_first(self, function: Callable[[], Any]) -> Any:
        """Returns on each rank what a function returns on rank 0, or raises its CheckpointError. A collective call."""
        if self.size == 1:
            return function()
        answer = None, None
        if self.rank == 0:
            try:
                answer = function(), None
            except CheckpointError as error:
                answer = None, str(error)  # type: ignore[assignment]
        value, message = self._module.broadcast_object(answer, root_rank=0)
        if message is not None:
            raise CheckpointError(message)
        return value

    def broadcast_variables(self, variables: Any) -> None:
        if self.size > 1:
            self._module.broadcast_variables(variables, root_rank=0)

    def barrier(self) -> None:
        self.any(False)


def share_samples(dataset: Any, global_batch: int, rank: int, size: int) -> Any:
    """Returns a rank's batches, each with the factor for its mean loss.

    The mean over ranks of the weighted gradients is the mean gradient of the step's samples. A rank without a sample in
    the last step of an epoch gets one of another rank, with the factor 0. All ranks need the samples in the same order.
    """

    def take(*step: Any) -> tuple[Any, Any]:
        samples = tf.shape(tf.nest.flatten(step)[0])[0]
        least, more = samples // size, samples % size
        own = least + tf.cast(rank < more, tf.int32)
        begin = tf.where(own > 0, rank * least + tf.minimum(rank, more), 0)
        end = begin + tf.maximum(own, 1)
        weight = tf.cast(own * size, tf.float32) / tf.cast(samples, tf.float32)
        part = tf.nest.map_structure(lambda each: each[begin:end], step)
        return part if len(part) > 1 else part[0], weight

    return dataset.batch(global_batch).map(take)


def weigh_samples(batch: Any, weight: Any) -> tuple[Any, Any, Any]:
    inputs, targets, *weights = batch
    factors = tf.fill(tf.shape(tf.nest.flatten(targets)[0])[:1], weight)
    return inputs, targets, factors * tf.cast(weights[0], factors.dtype) if weights else factors
