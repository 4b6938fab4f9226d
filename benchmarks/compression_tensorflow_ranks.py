"""One rank of the figures of TensorFlow in benchmarks/compression.py, under mpirun: `OUT speed|accuracy COUNT`."""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

os.environ["SMDDP_HOST"] = os.environ["OMPI_COMM_WORLD_RANK"]  # each rank has a host of its own

import tensorflow as tf
from mpi4py import MPI
from sklearn.datasets import load_digits

import smdistributed.dataparallel.tensorflow as sdp

WIDTH = 1024  # of three layers: 3.1 million parameters, 12.6 MB of gradients
WARM = 20  # steps, in which compression measures itself
EPOCHS = 8
SENT = Path("/sys/class/net/eth0/statistics/tx_bytes")


def main(words: Sequence[str]) -> None:
    """Measure speed or accuracy."""
    out, what, count = Path(words[0]), words[1], int(words[2])
    warnings.simplefilter("ignore")
    tf.config.threading.set_intra_op_parallelism_threads(1)
    sdp.init()
    found = {"speed": speed, "accuracy": accuracy}[what](count)
    if sdp.rank() == 0:
        out.write_text(json.dumps(found))


def speed(rounds: int) -> dict[str, dict[str, float]]:
    """Seconds and sent bytes of a step, by compression, in turns."""
    steps = {name: new_step(getattr(sdp.Compression, name)) for name in ("none", "fp16", "bf16", "int8")}
    for step in steps.values():
        for _ in range(WARM):
            step()
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    sent: dict[str, float] = {}
    for _ in range(rounds):
        for name, step in steps.items():
            MPI.COMM_WORLD.Barrier()
            before, began = int(SENT.read_text()), time.perf_counter()
            step()
            seconds[name].append(MPI.COMM_WORLD.allreduce(time.perf_counter() - began, MPI.MAX))
            sent[name] = int(SENT.read_text()) - before
    return {"seconds": {name: median(times) for name, times in seconds.items()}, "bytes": sent}


def new_step(compression: Any) -> Callable[[], Any]:
    """A step of a model of its own."""
    tf.keras.utils.set_random_seed(0)
    model = tf.keras.Sequential([tf.keras.layers.Dense(WIDTH) for _ in range(3)])
    batch = tf.random.normal([8, WIDTH])
    model(batch)
    optimizer = tf.keras.optimizers.SGD(1e-6)

    def step() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(batch) ** 2)
        gradients = sdp.DistributedGradientTape(tape, compression=compression).gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))

    return tf.function(step)  # type: ignore[no-any-return]


def accuracy(seeds: int) -> dict[str, dict[str, list[float]]]:
    """The errors of the digits in percent: by method and seed."""
    methods = {"none": "none", "fp16": "fp16", "bf16": "bf16", "int8": "int8_always"}
    return {
        "digits": {
            name: [train_digits(getattr(sdp.Compression, member), seed) for seed in range(seeds)]
            for name, member in methods.items()
        }
    }


def train_digits(compression: Any, seed: int) -> float:
    """The share of wrong answers, in percent, for the 360 digits that were not trained with."""
    tf.keras.utils.set_random_seed(seed)
    digits = load_digits()
    order = tf.random.shuffle(tf.range(len(digits.data)), seed=seed)
    images = tf.gather(tf.constant(digits.data, tf.float32) / 16, order)
    labels = tf.gather(tf.constant(digits.target), order)
    mine = slice(360 + sdp.rank(), None, sdp.size())
    model = tf.keras.Sequential([tf.keras.layers.Dense(256, activation="relu"), tf.keras.layers.Dense(10)])
    optimizer = sdp.DistributedOptimizer(tf.keras.optimizers.SGD(0.1, momentum=0.9), compression=compression)
    model.build((None, 64))
    model.compile(optimizer, tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    data = tf.data.Dataset.from_tensor_slices((images[mine], labels[mine])).batch(16, drop_remainder=True).take(44)
    model.fit(data, epochs=EPOCHS, verbose=0)
    wrong = tf.argmax(model(images[:360]), 1) != tf.cast(labels[:360], tf.int64)
    return float(100 * tf.reduce_mean(tf.cast(wrong, tf.float32)))


if __name__ == "__main__":
    main(sys.argv[1:])
