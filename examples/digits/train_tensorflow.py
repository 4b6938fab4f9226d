"""Train on the digits with a Keras model and a custom training step, data parallel on any number of ranks.

With `smdistributed.dataparallel.tensorflow`. Runs unchanged under `train` and mpirun, on GPUs or CPUs, and as a single
process: `python train_tensorflow.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import tensorflow as tf

import smdistributed.dataparallel.tensorflow as sdp

loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)


class Digits(NamedTuple):
    """Images, float32 (n, 8, 8) from 0 to 1, and their labels, int64 (n,)."""

    images: npt.NDArray[np.float32]
    labels: npt.NDArray[np.int64]


def arguments_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser of hyperparameters, which arrive as `--name value`. Paths default to SM_* variables."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--lr", type=float, default=2e-3, help="Adam's learning rate (default: 0.002)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data-dir", type=Path, default=os.environ.get("SM_CHANNEL_TRAINING"))
    parser.add_argument("--model-dir", type=Path, default=os.environ.get("SM_MODEL_DIR", "model"))
    parser.add_argument("--output-data-dir", type=Path, default=os.environ.get("SM_OUTPUT_DATA_DIR", "output"))
    return parser


def read_digits(data_dir: Path | None) -> tuple[Digits, Digits]:
    """Return the training and the test digits, from digits.npz in `data_dir` or from scikit-learn.

    Every fifth image of each digit is for the test.
    """
    if data_dir is None:
        from sklearn.datasets import load_digits

        pixels, numbers = load_digits().images, load_digits().target
    else:
        path = data_dir / "digits.npz"
        if not path.exists():
            raise FileNotFoundError(f"{path} is missing. Fix: python prepare.py {data_dir}")
        with np.load(path) as file:
            pixels, numbers = file["images"], file["labels"]
    images, labels = (pixels / 16).astype(np.float32), numbers.astype(np.int64)
    held_out = np.zeros(len(labels), dtype=bool)
    for digit in range(10):
        held_out[np.flatnonzero(labels == digit)[4::5]] = True
    return Digits(images[~held_out], labels[~held_out]), Digits(images[held_out], labels[held_out])


def make_net() -> Any:
    """Return a Keras model from images (n, 8, 8) to scores (n, 10)."""
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


def save_metrics(metrics: dict[str, float], arguments: argparse.Namespace) -> None:
    """Write metrics.json where the platform collects it, and print a summary. Called by one rank."""
    arguments.output_data_dir.mkdir(parents=True, exist_ok=True)
    (arguments.output_data_dir / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
    print(
        f"test accuracy {metrics['test_accuracy']:.4f} with world size {metrics['world_size']}, "
        f"model in {arguments.model_dir}",
        flush=True,
    )


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
