"""Train on the digits with a Keras model and a custom training step, data parallel on any number of ranks.

With the first-generation API, `smdistributed.dataparallel.tensorflow`. Runs unchanged under `train` and mpirun, on
GPUs or CPUs, and as a single process: `python train_tensorflow.py`.
"""

from __future__ import annotations

import time
from typing import Any

import tensorflow as tf
from digits import arguments_parser, read_digits
from digits_tensorflow import accuracy, make_net, save, share, share_size, use_device

import smdistributed.dataparallel.tensorflow as sdp

loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def main() -> None:
    arguments = arguments_parser(__doc__).parse_args()
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


if __name__ == "__main__":
    main()
