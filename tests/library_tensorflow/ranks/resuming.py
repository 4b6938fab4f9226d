"""A rank: trains a small network data parallel, and writes a line for each batch: its number, epoch and loss.

resuming.py fit|loop CHECKPOINTS LOG
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import smdistributed.dataparallel.tensorflow as sdp
import smdistributed.dataparallel.tensorflow.keras as sdk
from shoal_checkpoint.tensorflow import Checkpoint
from smdistributed.core.tensorflow.keras_release import is_keras_3

EPOCHS, SAMPLES, WIDTH, EVERY = 3, 48, 4, 2


def main(way: str, checkpoints: str, log: str) -> None:
    sdp.init()
    rank, size = sdp.rank(), sdp.size()
    if not is_keras_3():
        tf.keras.backend.experimental.enable_tf_random_generator()
    tf.keras.utils.set_random_seed(rank)
    model = tf.keras.Sequential(
        [
            tf.keras.layers.Dense(8, input_shape=(WIDTH,)),
            tf.keras.layers.Dropout(0.3),
            tf.keras.layers.BatchNormalization(),
            tf.keras.layers.Dense(1),
        ]
    )
    if size > 1:
        sdp.broadcast_variables(model.variables, root_rank=0)
    optimizer = tf.keras.optimizers.Adam(0.01)
    model.compile(sdk.DistributedOptimizer(optimizer) if way == "fit" else optimizer, "mse", metrics=["mae"])
    checkpoint = Checkpoint(checkpoints, every=EVERY, model=model, ranks=sdp)
    with Path(f"{log}-{rank}").open("a", buffering=1) as file:
        for epoch in checkpoint.epochs(EPOCHS):

            def write(loss: Any, epoch: int = epoch) -> None:
                file.write(f"{checkpoint.step} {epoch} {loss}\n")

            train = fit if way == "fit" else loop
            train(checkpoint, model, dataset(epoch, rank, size), write)
        weights = [float(each.numpy().astype(np.float64).sum()).hex() for each in model.trainable_variables]
        file.write(f"weights {weights}\n")


def dataset(epoch: int, rank: int, size: int) -> Any:
    values = np.arange(SAMPLES * WIDTH, dtype=np.float32).reshape(SAMPLES, WIDTH) / (SAMPLES * WIDTH)
    samples = tf.data.Dataset.from_tensor_slices((values, values.sum(1)))
    return samples.shuffle(SAMPLES, seed=epoch).shard(size, rank).batch(4)


def fit(checkpoint: Checkpoint, model: Any, batches: Any, write: Any) -> None:
    def on_batch_end(batch: int, logs: dict[str, float]) -> None:
        write([batch, *(value.hex() for value in logs.values())])

    own = tf.keras.callbacks.LambdaCallback(on_batch_end=on_batch_end)
    history = checkpoint.fit(batches, 4, callbacks=[own], verbose=0).history
    write(["epoch", *(value[0].hex() for value in history.values())])


def loop(checkpoint: Checkpoint, model: Any, batches: Any, write: Any) -> None:
    for values, targets in checkpoint.batches(batches, 4):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(values, training=True)[:, 0] - targets))
        gradients = sdp.DistributedGradientTape(tape).gradient(loss, model.trainable_variables)
        model.optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        write(float(loss).hex())


if __name__ == "__main__":
    main(*sys.argv[1:])
