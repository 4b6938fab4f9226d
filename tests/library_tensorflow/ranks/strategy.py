"""A worker of TensorFlow's MultiWorkerMirroredStrategy. NCCL and RING give the same graph, except for the hint's name.

Arguments: a directory that all workers see, and their ports. Ends with `equal`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

RANK = int(os.environ["RANK"])
DIRECTORY, PORTS = Path(sys.argv[1]), sys.argv[2:]
WORKERS = [f"127.0.0.1:{port}" for port in PORTS]
os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": WORKERS}, "task": {"type": "worker", "index": RANK}})
INPUTS = np.random.RandomState(0).standard_normal((8, 4)).astype(np.float32)
HINT = "communication_hint"


def strategy_with(name: str) -> Any:
    implementation = tf.distribute.experimental.CommunicationImplementation[name]
    options = tf.distribute.experimental.CommunicationOptions(implementation=implementation)
    return tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)


def step_of(strategy: Any) -> tuple[Any, Any]:
    """Returns a step on this worker's half of the inputs, and its model."""
    with strategy.scope():
        model = tf.keras.Sequential([tf.keras.Input((4,)), tf.keras.layers.Dense(1, kernel_initializer="ones")])
        optimizer = tf.keras.optimizers.SGD(0.1)
        optimizer.build(model.trainable_variables)

    def replica() -> None:
        mine = tf.constant(INPUTS[4 * RANK : 4 * RANK + 4])
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(mine) ** 2) / len(INPUTS)
        optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))

    return tf.function(lambda: strategy.run(replica)), model


def collectives(function: Any) -> list[dict[str, Any]]:
    """Returns the types, attributes and inputs of collectives in a function's graph."""
    graph = function.get_concrete_function().graph.as_graph_def()
    nodes = [*graph.node, *(node for each in graph.library.function for node in each.node_def)]
    found = [node for node in nodes if node.op.startswith("CollectiveReduce")]
    return [{"op": node.op, **{key: str(node.attr[key]) for key in node.attr}} for node in found]


def wait_for_all(name: str) -> None:
    """A new strategy aborts the collectives of the last one, which another worker may still be in."""
    (DIRECTORY / f"{name}-{RANK}").touch()
    while any(not (DIRECTORY / f"{name}-{rank}").exists() for rank in range(len(PORTS))):
        time.sleep(0.01)


by_hint = {}
for name in ("NCCL", "RING"):
    step, model = step_of(strategy_with(name))
    by_hint[name] = collectives(step)
    wait_for_all(name)
for name, found in by_hint.items():
    assert found and all(name.lower() in each.pop(HINT) for each in found), (name, found)
assert by_hint["NCCL"] == by_hint["RING"], by_hint

step()  # RING's
weights = np.ones((4, 1), np.float32)
expected = weights - 0.1 * 2 * INPUTS.T @ (INPUTS @ weights) / len(INPUTS)
np.testing.assert_allclose(model.get_weights()[0], expected, rtol=1e-5)
wait_for_all("end")
print("equal", flush=True)
