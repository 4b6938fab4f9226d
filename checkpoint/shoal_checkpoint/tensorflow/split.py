"""Shares the samples of a step between ranks, so that the steps are the same with any number of ranks."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def share(dataset: Any, global_batch: int, rank: int, size: int) -> Any:
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
