"""Shared by the TensorFlow scripts: the network, a rank's share of the digits, its GPU, and saving."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import tensorflow as tf
from digits import save_metrics

if TYPE_CHECKING:
    import argparse

    from digits import Digits


def make_net() -> Any:
    """Return a Keras model, equal to `Net` of digits_torch.py, from images (n, 8, 8) to scores (n, 10)."""
    layers = tf.keras.layers
    return tf.keras.Sequential(
        [
            layers.Reshape((8, 8, 1), input_shape=(8, 8)),
            layers.Conv2D(16, 3, padding="same", activation="relu"),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dropout(0.25),
            layers.Dense(64, activation="relu"),
            layers.Dropout(0.25),
            layers.Dense(10),
        ]
    )


def use_device(local_rank: int) -> None:
    """Use the GPU of this rank, if there are GPUs. Must be called before the first TensorFlow operation."""
    tf.config.threading.set_intra_op_parallelism_threads(1)  # one thread per rank is enough for this small network
    tf.config.threading.set_inter_op_parallelism_threads(1)
    gpus = tf.config.list_physical_devices("GPU")
    if gpus:
        tf.config.experimental.set_memory_growth(gpus[local_rank], True)
        tf.config.set_visible_devices(gpus[local_rank], "GPU")


def share(digits: Digits, rank: int, world_size: int, arguments: argparse.Namespace) -> Any:
    """Return this rank's batches, of an order that is the same on all ranks.

    If it is read several times, the order changes each time. All shares are of equal size.
    """
    images = shuffle(digits, arguments).take(share_size(digits, world_size) * world_size)
    return images.shard(world_size, rank).batch(arguments.batch_size)


def shuffle(digits: Digits, arguments: argparse.Namespace, epoch: int = 0) -> Any:
    """Return single images and labels, in an order that follows from the epoch and is the same on all ranks."""
    images = tf.data.Dataset.from_tensor_slices(tuple(digits))
    return images.shuffle(len(digits.labels), seed=arguments.seed + epoch)


def share_size(digits: Digits, world_size: int) -> int:
    """Return the number of images of a rank per epoch."""
    return len(digits.labels) // world_size


def accuracy(model: Any, test: Digits) -> float:
    scores = model(test.images, training=False)
    return float((scores.numpy().argmax(1) == test.labels).mean())


def save(model: Any, metrics: dict[str, float], arguments: argparse.Namespace) -> None:
    """Write the model and metrics.json where the platform collects them. Called by one rank.

    The model is a SavedModel in a directory named by a number, as TensorFlow Serving expects it.
    """
    model.save(arguments.model_dir / "1")
    save_metrics(metrics, arguments)
