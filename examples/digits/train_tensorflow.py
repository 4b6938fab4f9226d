"""Train on the digits with a Keras model and a custom training step, data parallel on any number of ranks.

With `smdistributed.dataparallel.tensorflow`. Runs unchanged under `train` and mpirun, on GPUs or CPUs, and as a single
process: `python train_tensorflow.py`.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import tensorflow as tf
from digits import arguments_parser, read_digits, save_metrics

import smdistributed.dataparallel.tensorflow as sdp

if TYPE_CHECKING:
    import argparse

    from digits import Digits

loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def make_net() -> Any:
    """Return a Keras model from images (n, 8, 8) to scores (n, 10)."""
    layers = tf.keras.layers
    return tf.keras.Sequential(
        [
            tf.keras.Input((8, 8)),
            layers.Reshape((8, 8, 1)),
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
    model.export(arguments.model_dir / "1")
    save_metrics(metrics, arguments)


def make_train_step(model: Any, optimizer: Any) -> Any:
    """Return a function that applies the mean gradient of all ranks for a batch, and returns this rank's loss."""

    def train_step(images: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(images, training=True))
        tape = sdp.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    return tf.function(train_step, reduce_retracing=True)  # the last batch of an epoch is smaller


def main() -> None:
    parser = arguments_parser(__doc__)
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step (default: 32)")
    parser.add_argument("--model_dir", dest="not_used", help="SageMaker's TensorFlow estimator passes it: not used")
    arguments = parser.parse_args()
    sdp.init()
    rank, world_size = sdp.rank(), sdp.size()
    use_device(sdp.local_rank())
    tf.keras.utils.set_random_seed(arguments.seed)

    training, test = read_digits(arguments.data_dir)
    batches = share(training, rank, world_size, arguments)
    model = make_net()
    optimizer = tf.keras.optimizers.Adam(arguments.lr)
    train_step = make_train_step(model, optimizer)

    images = share_size(training, world_size) * world_size
    training_seconds = 0.0
    for epoch in range(1, arguments.epochs + 1):
        start = time.perf_counter()
        losses = []
        for step, (pixels, labels) in enumerate(batches):
            losses.append(train_step(pixels, labels))
            if epoch == 1 and step == 0:  # the optimizer has its variables only now
                sdp.broadcast_variables(model.variables, root_rank=0)
                sdp.broadcast_variables(optimizer.variables, root_rank=0)
        loss = sdp.oob_allreduce(tf.reduce_mean(losses))
        seconds = time.perf_counter() - start
        training_seconds += seconds
        if rank == 0:
            print(
                f"epoch {epoch}/{arguments.epochs} loss {float(loss):.4f} {images / seconds:.0f} images/s", flush=True
            )

    if rank == 0:
        metrics = {
            "test_accuracy": accuracy(model, test),
            "images_per_second": images * arguments.epochs / training_seconds,
            "training_seconds": training_seconds,
            "epochs": arguments.epochs,
            "world_size": world_size,
        }
        save(model, metrics, arguments)


if __name__ == "__main__":
    main()
