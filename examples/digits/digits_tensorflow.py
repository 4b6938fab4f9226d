"""What the TensorFlow scripts here share: the network, a rank's share of the digits, its GPU, and saving."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import tensorflow as tf
from digits import save_metrics

if TYPE_CHECKING:
    import argparse

    from digits import Digits


def make_net() -> Any:
    """A Keras model: images (n, 8, 8), float32 from 0 to 1, to scores (n, 10). That of digits_torch.py."""
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
    """Take the GPU of this rank, where there are GPUs. Before the first operation, after which it is too late."""
    tf.config.threading.set_intra_op_parallelism_threads(1)  # the network is small: the cores are for the ranks
    tf.config.threading.set_inter_op_parallelism_threads(1)
    gpus = tf.config.list_physical_devices("GPU")
    if gpus:
        tf.config.experimental.set_memory_growth(gpus[local_rank], True)
        tf.config.set_visible_devices(gpus[local_rank], "GPU")


def share(digits: Digits, rank: int, world_size: int, arguments: argparse.Namespace) -> Any:
    """This rank's batches: each pass shuffles anew, the same way on all ranks, and every rank gets equally many."""
    count = len(digits.labels)
    batches = tf.data.Dataset.from_tensor_slices(tuple(digits)).shuffle(count, seed=arguments.seed)
    batches = batches.take(share_size(digits, world_size) * world_size).shard(world_size, rank)
    return batches.batch(arguments.batch_size)


def share_size(digits: Digits, world_size: int) -> int:
    """How many images a rank sees in one pass."""
    return len(digits.labels) // world_size


def accuracy(model: Any, test: Digits) -> float:
    scores = model(test.images, training=False)
    return float((scores.numpy().argmax(1) == test.labels).mean())


def save(model: Any, metrics: dict[str, float], arguments: argparse.Namespace) -> None:
    """Leave the model and metrics.json where the platform collects them. One rank calls it.

    A SavedModel in a directory that is a number: what TensorFlow Serving, and SageMaker's container of it, load.
    """
    model.save(arguments.model_dir / "1")
    save_metrics(metrics, arguments)
