"""Code that the TensorFlow scripts here share: the network, a rank's share of the digits, its GPU, and saving."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import tensorflow as tf
from digits import save_metrics

if TYPE_CHECKING:
    import argparse

    from digits import Digits


def make_net() -> Any:
    """A Keras model: images (n, 8, 8), float32 from 0 to 1, to scores (n, 10). Same as in digits_torch.py."""
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
    """Takes the GPU of this rank, if there are GPUs. Call it before the first operation."""
    tf.config.threading.set_intra_op_parallelism_threads(1)  # the network is small, and the ranks share the cores
    tf.config.threading.set_inter_op_parallelism_threads(1)
    gpus = tf.config.list_physical_devices("GPU")
    if gpus:
        tf.config.experimental.set_memory_growth(gpus[local_rank], True)
        tf.config.set_visible_devices(gpus[local_rank], "GPU")


def share(digits: Digits, rank: int, world_size: int, arguments: argparse.Namespace) -> Any:
    """This rank's batches. Each pass shuffles again, equally on all ranks, and every rank gets the same number."""
    count = len(digits.labels)
    batches = tf.data.Dataset.from_tensor_slices(tuple(digits)).shuffle(count, seed=arguments.seed)
    batches = batches.take(share_size(digits, world_size) * world_size).shard(world_size, rank)
    return batches.batch(arguments.batch_size)


def share_size(digits: Digits, world_size: int) -> int:
    """The number of images that a rank sees in one pass."""
    return len(digits.labels) // world_size


def accuracy(model: Any, test: Digits) -> float:
    scores = model(test.images, training=False)
    return float((scores.numpy().argmax(1) == test.labels).mean())


def save(model: Any, metrics: dict[str, float], arguments: argparse.Namespace) -> None:
    """Saves the model and metrics.json for the platform. One rank calls it.

    TensorFlow Serving, also in SageMaker's container, loads a SavedModel from a directory with a number as its name.
    """
    model.save(arguments.model_dir / "1")
    save_metrics(metrics, arguments)
