"""A rank: training on shares of a batch against one process on all of it; each rank computes both.

Argument: `on_a_host` or `between_hosts`. Ends with `equal` and the engine.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from tests.library_tensorflow.ranks.printing import print_line

import smdistributed.dataparallel.tensorflow as sdp
from smdistributed.core.tensorflow.keras_release import is_keras_3

STEPS, SHARE = 20, 8
Step = Callable[[Any, Any], Any]
sdp.init()
RANK, SIZE = sdp.rank(), sdp.size()


def batches() -> list[tuple[Any, Any]]:
    drawn = np.random.RandomState(0)
    size = (STEPS, SHARE * SIZE)
    return list(zip(drawn.standard_normal((*size, 6)).astype(np.float32), drawn.randint(0, 3, size)))


def model(seed: int) -> Any:
    initial = [tf.keras.initializers.GlorotUniform(seed + layer) for layer in range(2)]
    return tf.keras.Sequential(
        [
            tf.keras.layers.Dense(16, activation="tanh", input_shape=(6,), kernel_initializer=initial[0]),
            tf.keras.layers.Dense(3, kernel_initializer=initial[1]),
        ]
    )


def loss_of(model: Any, x: Any, y: Any) -> Any:
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x)))


def by_tape(model: Any, optimizer: Any, share: slice) -> Step:
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(model, x[share], y[share])
        wrapped = tape if share == slice(None) else sdp.DistributedGradientTape(tape)
        gradients = wrapped.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return loss

    return step


def by_optimizer(model: Any, optimizer: Any, share: slice) -> Step:
    if share != slice(None):
        optimizer = sdp.DistributedOptimizer(optimizer)

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(model, x[share], y[share])
        if is_keras_3():
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        else:
            optimizer.minimize(loss, model.trainable_variables, tape=tape)
        return loss

    return step


def against_one_process(way: Callable[[Any, Any, slice], Step], optimizer: Callable[[], Any], graph: bool) -> None:
    mine, alone = model(seed=RANK), model(seed=0)
    sdp.broadcast_variables(mine.variables, root_rank=0)
    steps = [
        way(mine, optimizer(), slice(RANK * SHARE, (RANK + 1) * SHARE)),
        way(alone, optimizer(), slice(None)),
    ]
    if graph:
        steps = [tf.function(step) for step in steps]
    for x, y in batches():
        found, expected = (step(tf.constant(x), tf.constant(y)) for step in steps)
        mean = float(sdp.oob_allreduce(found))
        assert abs(mean - float(expected)) <= 1e-6, (mean, float(expected))
    for variable, other in zip(mine.variables, alone.variables):
        np.testing.assert_allclose(variable.numpy(), other.numpy(), atol=2e-6)
        np.testing.assert_array_equal(sdp.broadcast(variable, 0).numpy(), variable.numpy())  # the same bits


def bits_of_every_rank() -> None:
    """What is averaged is the same on all ranks, bit for bit, and from run to run."""
    tensor = tf.constant(np.random.RandomState(RANK).standard_normal(100_003).astype(np.float32))
    first = sdp.oob_allreduce(tensor)
    for _ in range(5):
        np.testing.assert_array_equal(sdp.oob_allreduce(tensor).numpy(), first.numpy())
    np.testing.assert_array_equal(sdp.broadcast(first, SIZE - 1).numpy(), first.numpy())


def mixed_precision(optimizers: Any, *, each_nesting: bool) -> None:
    """However the optimizer that scales the loss is nested; `compile` wraps one that is not. First steps overflow."""
    scaled = tf.keras.mixed_precision.LossScaleOptimizer
    tf.keras.mixed_precision.set_global_policy("mixed_float16")
    wraps: tuple[Callable[[Any], Any], ...] = (
        sdp.DistributedOptimizer,
        lambda optimizer: scaled(sdp.DistributedOptimizer(optimizer)),
        lambda optimizer: sdp.DistributedOptimizer(scaled(optimizer)),
    )
    for wrap in wraps if each_nesting else wraps[2:]:
        tf.keras.utils.set_random_seed(0)
        fitted = tf.keras.Sequential([tf.keras.layers.Dense(2, input_shape=(3,))])
        fitted.compile(wrap(optimizers.SGD(0.1)), "mse")
        before = fitted.get_weights()[0]
        fitted.fit(np.full([8, 3], 1.0 + RANK), np.ones([8, 2]), batch_size=4, epochs=10, verbose=0)
        after = fitted.get_weights()[0]
        assert np.any(before != after)
        np.testing.assert_array_equal(sdp.broadcast(tf.constant(after), 0).numpy(), after)
    tf.keras.mixed_precision.set_global_policy("float32")


def an_overflow_on_one_rank() -> None:
    """All ranks skip the step, and halve the scale."""
    kind = tf.keras.mixed_precision.LossScaleOptimizer
    for is_inside in (True, False):
        inner, weight = tf.keras.optimizers.SGD(1.0), tf.Variable([3.0])
        optimizer = kind(sdp.DistributedOptimizer(inner)) if is_inside else sdp.DistributedOptimizer(kind(inner))
        step = tf.function(lambda factor, o=optimizer, w=weight: o.apply_gradients([(factor * w, w)]))
        step(tf.constant(np.inf if RANK == 1 else 1.0, tf.float32))
        scale = optimizer.dynamic_scale if is_keras_3() else optimizer.loss_scale
        assert float(weight[0]) == 3.0 and float(scale) == 2.0**14, (weight, scale)


def between_hosts() -> None:
    bits_of_every_rank()
    against_one_process(by_tape, lambda: tf.keras.optimizers.Adam(1e-2), graph=True)
    against_one_process(by_optimizer, lambda: tf.keras.optimizers.SGD(0.1, momentum=0.9, clipnorm=0.5), graph=False)


def on_a_host() -> None:
    bits_of_every_rank()
    mixed_precision(tf.keras.optimizers, each_nesting=True)
    an_overflow_on_one_rank()
    against_one_process(by_tape, lambda: tf.keras.optimizers.Adam(1e-2), graph=True)
    against_one_process(by_tape, lambda: tf.keras.optimizers.SGD(0.1), graph=False)
    against_one_process(by_optimizer, lambda: tf.keras.optimizers.SGD(0.1, momentum=0.9, clipnorm=0.5), graph=True)
    if is_keras_3():
        return
    legacy = tf.keras.optimizers.legacy
    mixed_precision(legacy, each_nesting=False)
    against_one_process(by_optimizer, lambda: legacy.Adam(1e-2), graph=True)
    against_one_process(by_optimizer, lambda: legacy.SGD(0.1), graph=False)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
    assert "torch" not in sys.modules
    print_line("equal")
