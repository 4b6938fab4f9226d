"""A rank: trains with a global batch that any number of ranks shares; rank 0 writes the weights at the end.

elastic.py fit|loop CHECKPOINTS LOG
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

EPOCHS, SAMPLES, WIDTH, GLOBAL_BATCH, EVERY = 2, 51, 4, 10, 2  # the last step of an epoch has a single sample


def main(way: str, checkpoints: str, log: str) -> None:
    sdp.init()
    tf.keras.utils.set_random_seed(0)
    model = tf.keras.Sequential([tf.keras.layers.Dense(8, input_shape=(WIDTH,)), tf.keras.layers.Dense(1)])
    optimizer = tf.keras.optimizers.Adam(0.01)
    model.compile(sdk.DistributedOptimizer(optimizer) if way == "fit" else optimizer, "mse")
    checkpoint = Checkpoint(checkpoints, every=EVERY, model=model, ranks=sdp)
    values = np.arange(SAMPLES * WIDTH, dtype=np.float32).reshape(SAMPLES, WIDTH) / (SAMPLES * WIDTH)
    for epoch in checkpoint.epochs(EPOCHS):
        samples = tf.data.Dataset.from_tensor_slices((values, values.sum(1))).shuffle(SAMPLES, seed=epoch)
        if way == "fit":
            checkpoint.fit(samples, global_batch=GLOBAL_BATCH, verbose=0)
        else:
            loop(checkpoint, model, samples)
    if sdp.rank() == 0:
        weights = np.concatenate([each.numpy().ravel() for each in model.trainable_variables])
        Path(log).write_text(f"{weights.tolist()}")


def loop(checkpoint: Checkpoint, model: Any, samples: Any) -> None:
    for values, targets in checkpoint.batches(samples, global_batch=GLOBAL_BATCH):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(values, training=True)[:, 0] - targets)) * checkpoint.weight
        gradients = sdp.DistributedGradientTape(tape).gradient(loss, model.trainable_variables)
        model.optimizer.apply_gradients(zip(gradients, model.trainable_variables))


if __name__ == "__main__":
    main(*sys.argv[1:])
