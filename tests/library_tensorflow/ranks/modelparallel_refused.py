"""A rank: refused uses, and their errors. Arguments: cases, one after the other. Prints each error's kind and
text."""

from __future__ import annotations

import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tensorflow as tf

import smdistributed.modelparallel.tensorflow as smp
from smdistributed.modelparallel.tensorflow import horovod as hvd

X, Y = tf.ones([4, 6]), tf.zeros([4], tf.int32)
smp.init({"partitions": 2, "microbatches": 2})


class Model(smp.DistributedModel):
    def __init__(self, case: str) -> None:
        super().__init__()
        self.case = case
        with smp.partition(0):
            self.first, self.same = tf.keras.layers.Dense(6), tf.keras.layers.Dense(6)
        with smp.partition(2 if case == "pinned" else 1):
            self.last = tf.keras.layers.Dense(3, trainable=case != "frozen")

    def call(self, x: Any, training: Any = None) -> Any:
        if self.case == "loop":
            for _ in tf.range(2):
                x = self.first(x)
        x = self.first(x)
        if self.case == "add_loss":
            self.add_loss(tf.reduce_mean(x))
        if self.case == "variable":
            return self.last(self.same(x)) @ self.first.kernel[:3]
        return self.last(x)


def make(case: str) -> Any:
    """A model, and a step that calls it."""
    model = Model(case)

    def branch(x: Any, _: Any) -> Any:
        return tf.cond(tf.reduce_sum(x) > 0.0, lambda: model(x), lambda: model(x) * 2.0)

    def again(x: Any, _: Any) -> Any:
        outputs = model(x)
        return model(tf.concat([outputs, outputs], 1))

    def nested(x: Any, y: Any) -> Any:
        return model(x), step(x, y)

    def get_grads(x: Any, y: Any) -> Any:
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x)))
        if case == "raises" and smp.rank():
            raise ValueError("a mistake in the script")
        return tf.gradients(loss, model.trainable_variables), loss

    step = smp.step({"branch": branch, "again": again, "nested": nested}.get(case, get_grads))
    return model, step


def refused(case: str) -> None:
    warnings.filterwarnings("error", ".* has no effect")
    warnings.filterwarnings("error", ".* each stage would clip")
    model, step = make(case)
    allreduce: Any = hvd.allreduce
    calls: dict[str, Callable[[], object]] = {
        "outside": lambda: model(X),
        "batch": lambda: step(X[:3], Y[:3]),
        "jit": lambda: tf.function(step, jit_compile=True)(X, Y),
        "jit_step": lambda: smp.step(jit_compile=True),
        "option": lambda: smp.step(non_split_input=["x"]),
        "average": lambda: allreduce(X, averages=True),
        "profile": lambda: model.profile(X),
        "clip": lambda: tf.clip_by_global_norm([X], 1.0),
        "accumulate": lambda: step(X, Y)[1].accumulate(method="sum"),
    }
    call = calls.get(case)
    step(X, Y) if call is None else call()


def absent(case: str) -> None:
    """The second rank is late for its second step: until a file is there, or for ever."""
    _, step = make(case)
    step(X, Y)
    if smp.rank() and case == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    while smp.rank() and not Path(case).exists():
        time.sleep(0.05)
    step(X, Y)


for case in sys.argv[1:]:
    tf.keras.backend.clear_session()  # names count anew
    try:
        (absent if case == "killed" or os.sep in case else refused)(case)
    except Exception as error:
        print(f"{type(error).__name__}: {error}\n", end="", flush=True)
