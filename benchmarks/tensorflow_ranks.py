"""One rank of benchmarks/tensorflow_image.py, in the image: `cases OUT ROUNDS`, or `start smddp|mwms`."""

from __future__ import annotations

import time

BEGAN = time.perf_counter()

import json  # noqa: E402 (what is imported counts)
import os  # noqa: E402
import sys  # noqa: E402
from collections.abc import Callable  # noqa: E402
from pathlib import Path  # noqa: E402
from statistics import median  # noqa: E402
from typing import Any  # noqa: E402

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

WORDS = 16 << 20  # of float32: 64 MB
WIDTH = 4096  # of the MLP's layers: three of them are 50 million parameters
PORTS = (23401, 23402)


def mirrored() -> Any:
    """TensorFlow's own strategy for the two ranks: its ring, over gRPC."""
    task = {"type": "worker", "index": int(os.environ["OMPI_COMM_WORLD_RANK"])}
    workers = [f"127.0.0.1:{port}" for port in PORTS]
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": task})
    ring = tf.distribute.experimental.CommunicationImplementation.RING
    options = tf.distribute.experimental.CommunicationOptions(implementation=ring)
    return tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)


def reduced_by(strategy: Any) -> Callable[[Any], Any]:
    def reduce(tensor: Any) -> Any:
        here = tf.identity(tensor)  # copies nothing, and names the device, which the strategy needs
        return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, here)

    return tf.function(lambda tensor: strategy.run(reduce, args=(tensor,)))  # type: ignore[no-any-return]


def cases(out: str, rounds: str) -> None:
    """Measure every case; seconds by case and way."""
    import smdistributed.dataparallel.tensorflow as sdp

    tf.config.threading.set_intra_op_parallelism_threads(1)
    strategy = mirrored()
    sdp.init()
    tensor = tf.random.normal([WORDS])
    ours, rival = tf.function(lambda tensor: sdp.oob_allreduce(tensor, op=sdp.ReduceOp.SUM)), reduced_by(strategy)
    times = {
        "all-reduce-64MB": measure({"smddp": lambda: ours(tensor), "mwms": lambda: rival(tensor)}, int(rounds)),
    }
    one, other = np.ones(WORDS, np.float32), np.empty(WORDS, np.float32)
    times["copy-64MB"] = measure({"host": lambda: np.copyto(other, one)}, int(rounds))
    times["mlp"] = measure(mlps(strategy, sdp), max(3, int(rounds) // 2))
    times["cnn"] = measure(cnns(sdp), int(rounds))
    if sdp.rank() == 0:
        Path(out).write_text(json.dumps(times))


def mlp() -> Any:
    return tf.keras.Sequential([tf.keras.layers.Dense(WIDTH, input_shape=(WIDTH,)) for _ in range(3)])


def mlps(strategy: Any, sdp: Any) -> dict[str, Callable[[], Any]]:
    """A step of an MLP, its batch one row: its gradients take as much of the time as they can."""
    batch = tf.random.normal([1, WIDTH])

    def ours() -> Callable[[], Any]:
        model, optimizer = mlp(), tf.keras.optimizers.SGD(1e-6)

        def step() -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(model(batch) ** 2)
            gradients = sdp.DistributedGradientTape(tape).gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))

        return tf.function(step)  # type: ignore[no-any-return]

    def rival() -> Callable[[], Any]:
        with strategy.scope():
            model, optimizer = mlp(), tf.keras.optimizers.SGD(1e-6)

        def step() -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(model(batch) ** 2) / strategy.num_replicas_in_sync
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))

        return tf.function(lambda: strategy.run(step))  # type: ignore[no-any-return]

    return {"smddp": ours(), "mwms": rival()}


def cnns(sdp: Any) -> dict[str, Callable[[], Any]]:
    """A step of a CNN, with its gradients reduced and without. They are small, and its computation is long."""
    layers: list[Any] = []
    for width in (32, 64, 128):
        layers += [tf.keras.layers.Conv2D(width, 3, padding="same", activation="relu"), tf.keras.layers.MaxPool2D()]
    model = tf.keras.Sequential([*layers, tf.keras.layers.Flatten(), tf.keras.layers.Dense(10)])
    images = tf.random.normal([64, 32, 32, 3])
    model(images)

    def step(is_reduced: bool) -> Callable[[], Any]:
        def run() -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(model(images) ** 2)
            wrapped = sdp.DistributedGradientTape(tape) if is_reduced else tape
            return wrapped.gradient(loss, model.trainable_variables)

        return tf.function(run)  # type: ignore[no-any-return]

    return {"smddp": step(is_reduced=True), "alone": step(is_reduced=False)}


def measure(runs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median seconds of each, in turns. In each round, after a barrier, the slowest rank counts."""
    from mpi4py import MPI

    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds + 2):
        for name, run in runs.items():
            MPI.COMM_WORLD.Barrier()
            began = time.perf_counter()
            run()
            slowest = MPI.COMM_WORLD.allreduce(time.perf_counter() - began, MPI.MAX)
            if turn > 1:  # the first calls trace
                times[name].append(slowest)
    return {name: median(seconds) for name, seconds in times.items()}


def start(way: str) -> None:
    """Seconds from the start of the process to the end of the first all_reduce."""
    if way == "smddp":
        import smdistributed.dataparallel.tensorflow as sdp

        sdp.init()
        sdp.oob_allreduce(tf.constant([1.0]))
    else:
        reduce = reduced_by(mirrored())
        reduce(tf.constant([1.0]))
    sys.stdout.write(json.dumps({"seconds": time.perf_counter() - BEGAN}) + "\n")  # in one: mpirun mixes writes


if __name__ == "__main__":
    ways: dict[str, Callable[..., None]] = {"cases": cases, "start": start}
    ways[sys.argv[1]](*sys.argv[2:])
