"""A rank: gradient compression between two hosts, or on one. Arguments: names of checks. Ends with `equal`."""

from __future__ import annotations

import itertools
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import tensorflow as tf
from tests.library_tensorflow.ranks.printing import print_line

import smdistributed.dataparallel.tensorflow as sdp
from smdistributed.core.compression import COMPARED_STEPS, WARM_STEPS
from smdistributed.core.exceptions import SMDDPError
from smdistributed.core.flat import Flat
from smdistributed.core.mpi import MpiTransport
from smdistributed.core.network_engines import NetworkEngine
from smdistributed.dataparallel.tensorflow import Compression
from smdistributed.dataparallel.tensorflow import horovod as hvd
from smdistributed.dataparallel.tensorflow.horovod import keras as hvd_keras

sdp.init()
RANK, SIZE = sdp.rank(), sdp.size()
ELEMENTS = 100_003  # several blocks, the last of them short, and a rest that the ranks cannot divide
STEPS = 30


def values(seed: int) -> Any:
    return np.random.RandomState(seed).standard_normal(ELEMENTS).astype(np.float32)


def reduced_by(compression: Any, *variables: Any) -> Callable[..., list[Any]]:
    """Returns a function that reduces its arguments as gradients of the variables."""

    def reduce(*gradients: Any) -> list[Any]:
        with tf.GradientTape() as tape:
            sums = [tf.reduce_sum(v * tf.cast(g, v.dtype)) for v, g in zip(variables, gradients)]
            loss = tf.add_n([tf.cast(each, tf.float32) for each in sums])
        found: list[Any] = sdp.DistributedGradientTape(tape, compression=compression).gradient(loss, variables)
        return found

    return reduce


def check_average() -> None:
    """One average is near, and the mean of many is much nearer: also if a step is traced again."""
    mean, variable = sum(map(values, range(SIZE))) / SIZE, tf.Variable(np.zeros(ELEMENTS, np.float32))
    reduce = reduced_by(Compression.int8_always, variable)
    total = np.zeros(ELEMENTS)
    for step in range(20):
        way = tf.function(reduce) if step % 10 == 5 else reduce
        (found,) = way(values(RANK))
        if not step:
            assert 1e-4 < np.abs(found - mean).max() < 0.06
            np.testing.assert_array_equal(sdp.broadcast(found, 0), found)
        total += found.numpy()
    assert np.abs(total / 20 - mean).max() < 0.006


def check_bytes() -> None:
    """Messages of a step, against those without compression. `make bench-compression` counts them on a wire."""
    real, sent = MpiTransport.send, []

    def send(self: MpiTransport, message: Flat, *place: int) -> Any:
        sent.append(message.bytes)
        return real(self, message, *place)

    totals = []
    for compression in (Compression.none, Compression.bf16, Compression.int8_always):
        reduce = reduced_by(compression, tf.Variable(np.zeros(100_000, np.float32)))
        with patch.object(MpiTransport, "send", send):
            reduce(values(RANK)[:100_000])
        totals.append(sum(sent))
        sent.clear()
    assert totals[1] == totals[0] / 2 and totals[2] <= 0.27 * totals[0], totals


def check_other_dtypes() -> None:
    """A mean of float64 travels in int8; infinities arrive, because scaling of losses looks for them."""
    variables = tf.Variable(np.zeros(ELEMENTS)), tf.Variable(np.zeros(ELEMENTS, np.float32))
    bad = values(RANK)
    bad[70_000 if RANK else 0] = np.inf if RANK == SIZE - 1 else 1.0
    found = reduced_by(Compression.int8_always, *variables)(values(RANK), bad)
    mean = sum(map(values, range(SIZE))) / SIZE
    assert found[0].dtype == tf.float64
    assert 1e-4 < np.abs(found[0] - mean).max() < 0.06
    assert not np.isfinite(found[1]).all()
    assert np.isfinite(found[1][:10_000]).all()
    (rounded,) = reduced_by(Compression.bf16, variables[1])(values(RANK))
    assert rounded.dtype == tf.float32
    np.testing.assert_allclose(rounded, mean, atol=0.03)
    assert np.any(rounded != mean)


def step_of_tape(model: Any, optimizer: Any, inputs: Any, labels: Any, **options: Any) -> Any:
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, model(inputs)))
    gradients = hvd.DistributedGradientTape(tape, **options).gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    return loss


def new_model() -> Any:
    tf.keras.utils.set_random_seed(1)
    first = tf.keras.layers.Dense(256, activation="tanh", input_shape=(64,))
    return tf.keras.Sequential([first, tf.keras.layers.Dense(8)])


def losses_with(compression: Any, wrap: Any) -> list[float]:
    """Returns the losses of a model, by a tape (`wrap` is None) or by `fit` with a wrapped optimizer."""
    drawn = np.random.RandomState(RANK).standard_normal((64, 64)).astype(np.float32)
    labels = drawn[:, :8].argmax(1)
    model, optimizer = new_model(), tf.keras.optimizers.SGD(0.2)
    if wrap is None:
        step = tf.function(lambda: step_of_tape(model, optimizer, drawn, labels, compression=compression))
        losses = [float(step()) for _ in range(STEPS)]
    else:
        loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(wrap(optimizer, compression=compression), loss)
        losses = model.fit(drawn, labels, batch_size=64, epochs=STEPS, shuffle=False, verbose=0).history["loss"]
    for weight in model.get_weights():
        np.testing.assert_array_equal(sdp.broadcast(weight, 0), weight)
    return losses


def check_training() -> None:
    plain = losses_with(Compression.none, None)
    for wrap in (None, sdp.DistributedOptimizer, hvd_keras.DistributedOptimizer):
        for compression in (Compression.bf16, Compression.int8_always, Compression.int8)[: 3 if wrap is None else 2]:
            last = losses_with(compression, wrap)[-1]
            assert abs(last - plain[-1]) < 0.02 < plain[0] - plain[-1], (wrap, compression, last, plain[-1])


def check_decisions() -> None:
    """The slower way is switched off, on all ranks: here a clock says in turn of each that it is."""
    for slow, fast in itertools.permutations(("all_reduce_int8", "all_reduce")):
        assert calls_after_the_trial(slow) == {slow: 0, fast: 1}


def calls_after_the_trial(slow: str) -> dict[str, int]:
    """How often each method of the communication engine runs in the step after the trial, if one of them is slow."""
    reals = {name: getattr(NetworkEngine, name) for name in ("all_reduce_int8", "all_reduce")}
    calls, slow_calls = dict.fromkeys(reals, 0), 0

    def replacement(name: str) -> Callable[..., None]:
        def run(*given: Any, **options: Any) -> None:
            nonlocal slow_calls
            calls[name] += 1
            slow_calls += name == slow
            reals[name](*given, **options)

        return run

    for name in reals:
        setattr(NetworkEngine, name, replacement(name))
    reduce = reduced_by(Compression.int8, tf.Variable(np.zeros(100_000, np.float32)))
    clock = Mock(perf_counter=lambda: time.perf_counter() + 100 * slow_calls)
    with patch("smdistributed.core.compression.time", clock), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(2 * (WARM_STEPS + COMPARED_STEPS) + 1):
            reduce(values(RANK)[:100_000])
    said = [str(one.message) for one in seen if "int8 is off from now on" in str(one.message)]
    assert len(said) == (RANK == 0 and slow == "all_reduce_int8"), said
    calls.update(dict.fromkeys(reals, 0))
    reduce(values(RANK)[:100_000])
    for name, real in reals.items():
        setattr(NetworkEngine, name, real)
    return calls


def check_errors() -> None:
    tensor = tf.constant([1.0])
    refused: tuple[tuple[str, Callable[[], object]], ...] = (
        ("A tensor has no next step", lambda: sdp.oob_allreduce(tensor, Compression.int8)),
        ("A tensor has no next step", lambda: hvd.allreduce(tensor, compression=Compression.int8)),
        ("not a variable", lambda: reduced_by(Compression.int8, tf.constant([1.0]))(tensor)),
        ("int8 has no MAX", lambda: sdp.DistributedOptimizer(None, compression=Compression.int8, op=sdp.ReduceOp.MAX)),
    )
    for words, call in refused:
        try:
            call()
        except SMDDPError as error:
            assert words in str(error) and "Fix: " in str(error), error
        else:
            raise AssertionError(words)


def check_one_host() -> None:
    """int8 has nothing to do, and says so once; nothing is rounded."""
    variable = tf.Variable(np.zeros(ELEMENTS, np.float32))
    reduce = reduced_by(Compression.int8, variable)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        results = [reduce(values(RANK))[0] for _ in range(2)]
    said = [str(one.message) for one in seen if "int8 is off: all ranks share the memory" in str(one.message)]
    assert len(said) == (RANK == 0), said
    for found in results:
        np.testing.assert_array_equal(found, reduced_by(Compression.none, variable)(values(RANK))[0])


if __name__ == "__main__":
    for name in sys.argv[1:]:
        globals()[f"check_{name}"]()
    print_line("equal")
