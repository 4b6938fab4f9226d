"""A rank: every function of the data parallel API, eager and in graphs, against numpy. Ends with `equal`.

Arguments: the names of cases; without any, all.
"""

from __future__ import annotations

import itertools
import sys
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.autograph.impl.api import StagingError
from tests.library_tensorflow.ranks.printing import print_line

import smdistributed.dataparallel.tensorflow as sdp
import smdistributed.dataparallel.tensorflow.keras as sdk
from smdistributed.core.exceptions import SMDDPError
from smdistributed.dataparallel.tensorflow import Compression, ReduceOp
from smdistributed.dataparallel.tensorflow import horovod as hvd

sdp.init()
RANK, SIZE = sdp.rank(), sdp.size()
FLOATS = (tf.float32, tf.float64, tf.float16, tf.bfloat16)
INTEGERS = (tf.int8, tf.uint8, tf.int16, tf.uint16, tf.int32, tf.uint32, tf.int64, tf.uint64)
NUMPY: dict[ReduceOp, Callable[..., Any]] = {
    ReduceOp.SUM: np.sum,
    ReduceOp.MIN: np.min,
    ReduceOp.MAX: np.max,
    ReduceOp.AVERAGE: np.mean,
}
SHAPES = ((), (1,), (7, 3), (0, 4), (70_001,))


def given(rank: int, shape: tuple[int, ...]) -> Any:
    """Small whole numbers: sums and means over up to four ranks are exact in every dtype."""
    return 4 * np.random.RandomState(rank).randint(0, 8, shape)


def ways(function: Callable[..., Any]) -> tuple[Callable[..., Any], ...]:
    return function, tf.function(function), tf.function(function, jit_compile=False, reduce_retracing=True)


def every_dtype() -> None:
    for number, (dtype, op) in enumerate(itertools.product((*FLOATS, *INTEGERS), ReduceOp)):
        eager, graph, retraced = ways(lambda tensor, op=op: sdp.oob_allreduce(tensor, op=op))
        traced = number // len(ReduceOp) % len(ReduceOp) == number % len(ReduceOp)  # one of each dtype: it takes long
        for shape in SHAPES:
            everybodys = [given(rank, shape) for rank in range(SIZE)]
            expected = NUMPY[op](np.stack(everybodys).astype(np.float64), 0)
            tensor = tf.constant(given(RANK, shape), dtype)
            graphs = [retraced, *([graph] if shape == SHAPES[-1] else [])] if traced else []
            for reduce in (eager, *graphs):
                found = reduce(tensor)
                assert found.dtype == dtype and found.shape == shape, (found, dtype)
                np.testing.assert_array_equal(tf.cast(found, tf.float64).numpy(), np.trunc(expected), f"{dtype} {op}")
            np.testing.assert_array_equal(tf.cast(tensor, tf.float64).numpy(), given(RANK, shape))  # not in place


def structures() -> None:
    found = sdp.oob_allreduce({"b": [tf.constant(float(RANK)), 2.0], "a": (tf.constant(RANK),)}, op=ReduceOp.SUM)
    ranks = sum(range(SIZE))
    assert float(found["b"][0]) == ranks and float(found["b"][1]) == 2.0 * SIZE and int(found["a"][0]) == ranks
    assert float(sdp.allreduce(tf.constant(1.0 + RANK), param_index=0, num_params=1)) == 1 + ranks / SIZE
    assert float(sdp.allreduce(grad=tf.constant(1.0), param_index=0, num_params=1, op=ReduceOp.SUM)) == SIZE
    assert float(sdp.allreduce(1.5, 0, 1)) == 1.5 and sdp.oob_allreduce([np.ones(2)])[0].shape == 2
    assert sdp.allreduce(None, 0, 1) is None and sdp.oob_allreduce([]) == []
    layer = object()
    assert sdp.overlap(layer) is layer


def horovod_names() -> None:
    """What scripts for Horovod call: the same in eager code and in a graph."""
    mine = tf.fill([RANK + 1, 2], float(RANK))
    everybodys = np.concatenate([np.full([rank + 1, 2], float(rank)) for rank in range(SIZE)])
    for gather in ways(sdp.allgather)[:2]:
        np.testing.assert_array_equal(gather(mine).numpy(), everybodys)
    np.testing.assert_array_equal(sdp.allgather(tf.constant([RANK > 0])).numpy(), [rank > 0 for rank in range(SIZE)])
    weight = tf.Variable(mine)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(sdp.allgather(weight) ** 2) * (1.0 + RANK)
    factor = sum(1.0 + rank for rank in range(SIZE))
    np.testing.assert_allclose(tape.gradient(loss, weight).numpy(), 2 * factor * mine.numpy())
    numbers = tf.range(2 * SIZE) + 100 * RANK  # two for each rank
    found = sdp.alltoall(numbers)
    np.testing.assert_array_equal(found, [100 * rank + 2 * RANK + i for rank in range(SIZE) for i in range(2)])
    splits = [rank + 1 for rank in range(SIZE)]
    found, received = tf.function(sdp.alltoall)(tf.repeat(tf.range(SIZE), splits) + 10 * RANK, splits)
    np.testing.assert_array_equal(found, np.repeat([RANK + 10 * rank for rank in range(SIZE)], RANK + 1))
    np.testing.assert_array_equal(received, [RANK + 1] * SIZE)
    found = sdp.broadcast_object({"rank": RANK, "text": "x" * 100 * RANK}, root_rank=SIZE - 1)
    assert found == {"rank": SIZE - 1, "text": "x" * 100 * (SIZE - 1)}, found
    sdp.barrier()
    assert sdp.is_initialized() and not tf.function(sdp.barrier)()
    ranks = sum(range(SIZE))
    for total in (
        sdp.allreduce(tf.constant(float(RANK)), average=False, name="total"),
        sdp.allreduce(tf.constant(float(RANK)), op="Sum"),
        sdp.oob_allreduce(tf.constant(float(RANK)), op=sdp.Sum),
        hvd.allreduce(tf.constant(float(RANK)), False),
        hvd.allreduce(tf.constant(float(RANK)), op=hvd.Average, prescale_factor=2.0, postscale_factor=SIZE / 2),
    ):
        assert float(total) == ranks, total
    assert float(sdp.allreduce(tf.constant(float(RANK)), average=True)) == ranks / SIZE
    graph = tf.function(lambda x: sdp.broadcast(x, 0, name="wanted")).get_concrete_function(tf.constant(1.0)).graph
    assert any(operation.name == "wanted" for operation in graph.get_operations())
    hvd.init()  # as Horovod's, it may be called again


def without_effect() -> None:
    """Each has a warning, on the first rank."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sdp.overlap(object())
        sdp.allreduce(tf.constant(1.0), 0, 1)
        sdp.DistributedOptimizer(tf.keras.optimizers.SGD(), name="mine")
    found = [str(one.message) for one in caught if "no effect" in str(one.message)]
    options = "overlap()", "allreduce(param_index=, num_params=)", "DistributedOptimizer(name=, use_locking=)"
    assert [words.split(" has ")[0] for words in found] == [*options] * (RANK == 0), found


def compression() -> None:
    tensor = tf.constant([1.0, 2.0**-30, 1e6], tf.float32)
    for reduce in ways(lambda tensor: sdp.oob_allreduce(tensor, Compression.fp16, ReduceOp.MAX)):
        found = reduce(tensor)
        assert found.dtype == tf.float32
        np.testing.assert_array_equal(found.numpy(), [1.0, 0.0, np.inf])
    assert sdp.oob_allreduce(tf.constant(7), Compression.fp16).dtype == tf.int32


def broadcasts() -> None:
    for number, (root, dtype) in enumerate(itertools.product(range(SIZE), (*FLOATS, *INTEGERS, tf.bool))):
        eager, *graphs = ways(lambda tensor, root=root: sdp.broadcast(tensor, root))
        for send in (eager, graphs[number % 2]):
            found = send(tf.cast(tf.constant(given(RANK, (5, 2))), dtype))
            np.testing.assert_array_equal(
                tf.cast(found, tf.int32), tf.cast(tf.cast(given(root, (5, 2)), dtype), tf.int32)
            )
    for spread in (sdp.broadcast_variables, tf.function(sdp.broadcast_variables)):
        variables = [tf.Variable(float(RANK)), tf.Variable([RANK] * 4), tf.Variable(tf.fill([2, 2], RANK * 1.0))]
        spread(variables, SIZE - 1)
        assert all(np.all(variable.numpy() == SIZE - 1) for variable in variables)


def in_order() -> None:
    """Branches and loops whose collectives differ in size: any other order than the program's would be an error."""

    def program(tensor: Any, turns: Any) -> Any:
        first = sdp.oob_allreduce(tensor, op=ReduceOp.SUM)
        second = sdp.oob_allreduce(tensor[:2], op=ReduceOp.SUM)  # needs nothing of the first
        if tf.reduce_sum(tensor) > 0.0:
            first += tf.reduce_sum(sdp.oob_allreduce(tensor[:3], op=ReduceOp.SUM))
        for turn in tf.range(turns):
            first += sdp.oob_allreduce(tf.cast(turn, tf.float32) + tensor[0])
            sdp.oob_allreduce(tensor[:1])
        return first + second[0]

    graph = tf.function(program)
    for _ in range(5):
        found = graph(tf.ones([4]), 3)
        np.testing.assert_array_equal(found.numpy(), [SIZE + 3.0 * SIZE + 6.0 + SIZE] * 4)


def tape() -> None:
    table, weight, unused = tf.Variable(tf.ones([6, 2])), tf.Variable(3.0), tf.Variable(1.0)

    def gradients(rows: Any, scale: Any) -> Any:
        with tf.GradientTape(persistent=True) as inner:
            loss = tf.reduce_sum(tf.nn.embedding_lookup(table, rows)) * scale * weight
            other = weight**2 * scale
        distributed = sdp.DistributedGradientTape(inner)
        both = distributed.gradient(loss, {"table": table, "rest": [weight, unused]})
        return both["table"], both["rest"][0], distributed.gradient(other, weight), both["rest"][1] is None

    for run in ways(gradients):
        found = run(tf.constant([RANK, RANK]), tf.constant(1.0 + RANK))
        expected = np.zeros([6, 2])
        for rank in range(SIZE):
            expected[rank] += 2 * 3.0 * (1 + rank) / SIZE
        scale = np.mean([1.0 + rank for rank in range(SIZE)])
        np.testing.assert_allclose(found[0].numpy(), expected, rtol=1e-6)
        np.testing.assert_allclose([found[1].numpy(), found[2].numpy()], [4.0 * scale, 6.0 * scale], rtol=1e-6)
        assert found[3]
    with sdp.DistributedGradientTape(tf.GradientTape()) as opened:
        opened.watch(weight)
        loss = weight * (1.0 + RANK)
    assert abs(float(opened.gradient(loss, weight)) - scale) < 1e-6


def higher_order() -> None:
    x = tf.Variable(2.0)
    with tf.GradientTape() as outer:
        with tf.GradientTape() as inner:
            y = x**3 * (1.0 + RANK)
        first = sdp.DistributedGradientTape(inner).gradient(y, x)
    second = sdp.DistributedGradientTape(outer).gradient(first, x)  # through the first reduction
    scale = np.mean([1.0 + rank for rank in range(SIZE)])
    np.testing.assert_allclose([float(first), float(second)], [12 * scale, 12 * scale], rtol=1e-6)


def version_1() -> None:
    """A session with a hook, a version 1 optimizer and collectives of its own."""
    with tf.Graph().as_default():
        weight = tf.compat.v1.get_variable("weight", initializer=tf.constant(float(RANK)))
        loss = weight * (1.0 + RANK)
        optimizer = sdp.DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(1.0))
        train = optimizer.apply_gradients(optimizer.compute_gradients(loss, [weight]))
        summed = [sdp.oob_allreduce(tf.ones([length]), op=ReduceOp.SUM) for length in (3, 5, 1)]
        hooks = [sdp.BroadcastGlobalVariablesHook(SIZE - 1)]
        with tf.compat.v1.train.MonitoredTrainingSession(hooks=hooks) as session:
            for found in session.run(summed):
                assert np.all(found == SIZE)
            session.run(train)
            after = session.run(weight)
    assert abs(after - (SIZE - 1 - np.mean([1.0 + rank for rank in range(SIZE)]))) < 1e-6, after


def graphs_of_version_1() -> None:
    """Branches in two graphs; a hook that runs nothing but itself; eager code goes on after them."""
    for _ in range(2):
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            fed = tf.compat.v1.placeholder(tf.float32, [])
            branch = tf.cond(fed > 0, partial(sdp.oob_allreduce, fed, op=ReduceOp.SUM), partial(tf.identity, fed))
            assert session.run(branch, {fed: 2.0}) == 2.0 * SIZE
            summed = sdp.oob_allreduce(fed, op=ReduceOp.SUM)
    with tf.Graph().as_default():
        fed = tf.compat.v1.placeholder(tf.float32, [])
        weight = tf.compat.v1.get_variable("weight", initializer=tf.constant(float(RANK)))
        summed = sdp.oob_allreduce(fed * weight, op=ReduceOp.SUM)
        with tf.compat.v1.train.MonitoredTrainingSession(hooks=[sdp.BroadcastGlobalVariablesHook(SIZE - 1)]) as session:
            assert session.run(summed, {fed: 3.0}) == 3.0 * (SIZE - 1) * SIZE
    assert float(sdp.oob_allreduce(tf.constant(1.0), op=ReduceOp.SUM)) == SIZE


def refusals() -> None:
    nothing: Any = None
    refused: tuple[tuple[str, Callable[[], object]], ...] = (
        ("called before", sdp.init),
        ("is not a rank", lambda: sdp.broadcast(tf.constant(1), SIZE)),
        ("cast them", lambda: sdp.oob_allreduce(tf.constant([True, False]))),
        ("wrap it once", lambda: sdp.DistributedOptimizer(sdp.DistributedOptimizer(tf.keras.optimizers.SGD()))),
        ("is not a reduction", lambda: sdp.oob_allreduce(tf.constant(1), op=nothing)),
        ("not supported", lambda: sdp.DistributedGradientTape(tf.GradientTape(), device_dense="/gpu:0")),
        ("sparse_as_dense", lambda: sdp.DistributedGradientTape(tf.GradientTape(), sparse_as_dense=False)),
        ("no optimizer", lambda: sdp.DistributedOptimizer(object())),
        ("no global variables", lambda: sdp.broadcast_global_variables(0)),
        ("leave average out", lambda: sdp.allreduce(tf.constant(1), average=True, op="Sum")),
        ("'Mean' is not a reduction", lambda: sdp.DistributedGradientTape(tf.GradientTape(), op="Mean")),
        ("the training step", lambda: sdp.DistributedOptimizer(tf.keras.optimizers.SGD(), backward_passes_per_step=2)),
        ("as many steps", sdp.join),
        ("pass a scalar as", lambda: sdp.allgather(1.0)),
        ("outside of tf.function", lambda: tf.function(lambda: sdp.broadcast_object(1))()),
        ("leave jit_compile=True out", lambda: tf.function(sdp.oob_allreduce, jit_compile=True)(tf.constant(1.0))),
        ("neither fused=True", lambda: sdp.SyncBatchNormalization(fused=True)),
    )
    for words, call in refused:
        try:
            call()
        except (SMDDPError, StagingError) as error:
            assert words in str(error), error
        else:
            raise AssertionError(words)
    loose: Any = sdp
    loose_keras: Any = sdk
    unknown: tuple[tuple[str, Callable[[], object]], ...] = (
        (
            "allreduce() got an unexpected keyword argument 'ops'. Did you mean 'op'?",
            lambda: loose.allreduce(tf.constant(1.0), ops=1),
        ),
        ("Did you mean 'compression'?", lambda: loose.oob_allreduce(1.0, compresion=1)),
        ("Did you mean 'sparse_as_dense'?", lambda: loose.DistributedGradientTape(nothing, sparse_as_dens=True)),
        ("Did you mean 'bucket_cap_mb'?", lambda: loose_keras.DistributedOptimizer(nothing, bucket_cap=1)),
        ("got an unexpected keyword argument 'zzz'. It has: ", lambda: loose.DistributedOptimizer(nothing, zzz=1)),
    )
    for words, call in unknown:
        try:
            call()
        except TypeError as error:
            assert words in str(error), error
        else:
            raise AssertionError(words)


if __name__ == "__main__":
    cases = (
        *(without_effect, every_dtype, structures, horovod_names, compression, broadcasts, in_order, tape),
        *(higher_order, version_1, graphs_of_version_1, refusals),
    )
    for case in cases:
        if case.__name__ in sys.argv[1:] or (not sys.argv[1:] and (SIZE > 1 or case is not every_dtype)):
            case()
            print(f"rank {RANK}: {case.__name__}", file=sys.stderr, flush=True)
    assert "torch" not in sys.modules
    print_line("equal")
