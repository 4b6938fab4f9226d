"""One rank of benchmarks/tensorflow_image.py: a Keras model on stages against the same in one piece.

    tensorflow_stages.py MP_PARAMETERS loss|step

`loss`: the largest difference of 20 losses. `step`: seconds of a step, the median of STEPS. Each operation runs on one
thread. A stage computes one operation at a time; with several stages, another thread waits for messages. Rank 0 prints
JSON.
"""

from __future__ import annotations

import json
import sys
import time
from statistics import median
from typing import Any

import numpy as np
import tensorflow as tf

import smdistributed.modelparallel.tensorflow as smp

LOSSES, STEPS, CLASSES = 20, 7, 10
SIZES = {"loss": (64, 32), "step": (1024, 2048)}  # width of the layers, batch


def model_of(kind: type, width: int) -> Any:
    class Net(kind):  # type: ignore[misc]
        """A chain of dense layers with a connection past two of them."""

        def __init__(self) -> None:
            super().__init__()
            self.parts = [tf.keras.layers.Dense(width, activation="relu") for _ in range(8)]
            self.norm, self.last = tf.keras.layers.LayerNormalization(), tf.keras.layers.Dense(CLASSES)

        def call(self, x: Any, training: Any = None) -> Any:
            for part in self.parts[:4]:
                x = part(x)
            skipped = self.norm(x)
            for part in self.parts[4:]:
                x = part(x)
            return self.last(x + skipped)

    tf.keras.utils.set_random_seed(1)
    return Net()


def loss_of(scores: Any, labels: Any) -> Any:
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, scores))


def on_stages(width: int) -> Any:
    model, optimizer = model_of(smp.DistributedModel, width), tf.keras.optimizers.Adam(1e-3)

    @smp.step
    def get_grads(x: Any, y: Any) -> Any:
        loss = loss_of(model(x, training=True), y)
        return optimizer.get_gradients(loss, model.trainable_variables), loss

    def train_step(x: Any, y: Any) -> Any:
        gradients, loss = get_grads(x, y)
        optimizer.apply_gradients(zip([g.accumulate() for g in gradients], model.trainable_variables, strict=True))
        return loss.reduce_mean()

    return tf.function(train_step)


def in_one_piece(width: int) -> Any:
    model, optimizer = model_of(tf.keras.Model, width), tf.keras.optimizers.Adam(1e-3)

    def train_step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(model(x, training=True), y)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    return tf.function(train_step)


def batch(number: int, width: int, size: int) -> tuple[Any, Any]:
    random = np.random.RandomState(number)
    return tf.constant(random.standard_normal((size, width)).astype("float32")), random.randint(0, CLASSES, size)


def trained(step: Any, batches: list[tuple[Any, Any]]) -> list[float]:
    return [float(step(x, y)) for x, y in batches]


def losses(width: int, size: int) -> dict[str, float]:
    batches = [batch(number, width, size) for number in range(LOSSES)]
    # One after the other: weights are drawn at the first call, and both begin with the same seed.
    split, whole = (trained(make(width), batches) for make in (on_stages, in_one_piece))
    return {"difference": max(abs(one - other) for one, other in zip(split, whole, strict=True))}


def seconds(width: int, size: int) -> dict[str, float]:
    """A step of all stages takes as long as the slowest."""
    step = on_stages(width)
    x, y = batch(0, width, size)
    found = []
    for number in range(STEPS + 2):
        smp.barrier()
        began = time.perf_counter()
        float(step(x, y))
        slowest = max(smp.allgather(time.perf_counter() - began))
        if number > 1:  # the first ones compile
            found.append(slowest)
    return {"seconds": median(found)}


def main(parameters: str, what: str) -> None:
    tf.config.threading.set_intra_op_parallelism_threads(1)
    if json.loads(parameters)["partitions"] == 1:
        tf.config.threading.set_inter_op_parallelism_threads(1)
    smp.init(json.loads(parameters))
    result = {"loss": losses, "step": seconds}[what](*SIZES[what])
    if smp.rank() == 0:
        sys.stdout.write(f"{json.dumps(result)}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
