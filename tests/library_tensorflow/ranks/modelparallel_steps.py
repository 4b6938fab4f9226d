"""A rank: steps that follow each other, and what all stages must have in common. Ends with `equal`."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

import smdistributed.modelparallel.tensorflow as smp

smp.init({"partitions": 2, "microbatches": 2})
X = np.random.RandomState(0).standard_normal((16, 6)).astype(np.float32)
Y = np.arange(16) % 3


class Net(smp.DistributedModel):
    def __init__(self, is_noisy: bool = False) -> None:
        super().__init__()
        self.parts = [tf.keras.layers.Dense(6, activation="tanh") for _ in range(3)] + [tf.keras.layers.Dense(3)]
        self.is_noisy = is_noisy

    def call(self, x: Any, training: Any = None) -> Any:
        noise = tf.random.normal([6])
        for part in self.parts:
            x = part(x + noise if self.is_noisy and x.shape[-1] == 6 else x)
        return x


def make(seed: int) -> Net:
    tf.keras.utils.set_random_seed(seed)
    return Net()


model, other, noisy = make(1), make(2), Net(is_noisy=True)


@smp.step
def get_grads(x: Any, y: Any) -> Any:
    loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x)))
    return tf.gradients(loss, model.trainable_variables), loss


@smp.step
def predict(x: Any) -> Any:
    return model(x)


@smp.step
def predict_other(x: Any) -> Any:
    return other(x)


@smp.step
def look_up(x: Any, places: Any) -> Any:
    """Fails where a place is not there."""
    return tf.gather(model(x), places, batch_dims=1)


@smp.step
def draw(x: Any) -> Any:
    return noisy(x), tf.random.uniform([3])


def functions_are_traced_once() -> None:
    traced = []

    def train() -> Any:
        traced.append(smp.state.steps)
        return get_grads(X, Y)[1].reduce_mean()

    function = tf.function(train)
    assert function() == function()
    assert (traced, smp.state.steps) == ([0], 1), (traced, smp.state.steps)


def weights_of_a_constructor_can_be_read_before_the_first_step() -> None:
    class Built(smp.DistributedModel):
        def __init__(self) -> None:
            super().__init__()
            self.parts = [tf.keras.layers.Dense(6), tf.keras.layers.Dense(6)]
            for part in self.parts:
                part.build((None, 6))

        def call(self, x: Any, training: Any = None) -> Any:
            return self.parts[1](self.parts[0](x))

    tf.keras.utils.set_random_seed(3)
    built = Built()
    kernels = [part.kernel.numpy() for part in built.parts]
    outputs = smp.step(lambda x: built(x))(X).merge()
    np.testing.assert_allclose(outputs, X @ kernels[0] @ kernels[1], atol=1e-5)
    (here,) = (v for v in built.variables if "kernel" in v.name)  # the others' memory is free again
    np.testing.assert_array_equal(here, kernels[smp.pp_rank()])
    first, second = smp.allgather(kernels)
    np.testing.assert_array_equal(first, second)


def two_calls_in_one_function_take_turns() -> None:
    def means(half: slice) -> list[Any]:
        gradients, loss = get_grads(X[half], Y[half])
        return [loss.reduce_mean(), *(gradient.accumulate() for gradient in gradients)]

    halves = slice(0, 8), slice(8, 16)
    together = tf.function(lambda: [means(half) for half in halves])
    apart = [means(half) for half in halves]
    for _ in range(5):
        for found, expected in zip(together(), apart):
            for one, two in zip(found, expected):
                np.testing.assert_allclose(one, two, atol=1e-6)


def two_steps_in_one_function_take_turns() -> None:
    def all_three() -> list[Any]:
        return [predict(X).merge(), predict_other(X).merge(), predict(X[:4]).merge()]

    together, apart = tf.function(all_three), all_three()
    for _ in range(5):
        for found, expected in zip(together(), apart):
            np.testing.assert_allclose(found, expected, atol=1e-6)


def a_step_follows_one_that_has_failed() -> None:
    expected = predict(X[:4]).merge().numpy()
    for _ in range(3):
        try:
            look_up(X[:4], tf.constant([0, 1, 99, 2]))
        except tf.errors.InvalidArgumentError:
            pass
        else:
            raise AssertionError("a place that is not there was found")
        np.testing.assert_allclose(predict(X[:4]).merge(), expected, atol=1e-6)


def random_numbers_are_those_of_all_stages() -> None:
    for _ in range(3):
        outputs, drawn = draw(X)
        for mine in (outputs.merge().numpy(), drawn.stack().numpy()):
            first, second = smp.allgather(mine)
            np.testing.assert_array_equal(first, second)
        numbers = drawn.stack().numpy()
        assert len(np.unique(numbers)) == numbers.size


functions_are_traced_once()
weights_of_a_constructor_can_be_read_before_the_first_step()
two_calls_in_one_function_take_turns()
two_steps_in_one_function_take_turns()
a_step_follows_one_that_has_failed()
random_numbers_are_those_of_all_stages()
print("equal\n", end="", flush=True)
