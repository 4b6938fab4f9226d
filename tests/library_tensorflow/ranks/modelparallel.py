"""A rank: models on stages against the same in one piece, after 20 steps. Arguments: mp_parameters as JSON, cases.

The first rank computes the latter. Each ends with `equal` where losses and weights are the same to 1e-6.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

import smdistributed.modelparallel.tensorflow as smp

STEPS, BATCH, CLASSES = 20, 16, 5
L = tf.keras.layers
smp.init(json.loads(sys.argv[1]))


@dataclass
class Case:
    """build: makes the layers of a model, as its attributes. call: as `Model.call`. data: inputs for a step, of a batch
    of that size. optimizer: makes one. microbatched: whether a batch in one piece gives something else, so that the
    model in one piece gets microbatches as well. loss: of outputs and labels. close: how close losses and weights are.
    """

    build: Callable[[Any], None]
    call: Callable[..., Any]
    data: Callable[[Any, int], Any]
    optimizer: Callable[[], Any] = lambda: tf.keras.optimizers.Adam(1e-2)
    microbatched: bool = False
    loss: Callable[[Any, Any], Any] = lambda outputs, labels: tf.reduce_mean(
        tf.nn.sparse_softmax_cross_entropy_with_logits(labels, tf.cast(outputs, tf.float32))
    )
    close: tuple[float, float] = (1e-6, 2e-5)


def vectors(random: Any, size: int) -> Any:
    return random.standard_normal((size, 8)).astype(np.float32)


def images(random: Any, size: int) -> Any:
    return random.standard_normal((size, 8, 8, 2)).astype(np.float32)


def words(random: Any, size: int) -> Any:
    """With padding at the end, which is masked."""
    found = random.randint(1, 20, (size, 6))
    found[:, 4:] *= random.randint(0, 2, (size, 1))
    return found


# --- models


def dense(model: Any) -> None:
    model.parts = [L.Dense(16, activation="tanh"), L.Dense(16), L.Dense(16, activation="relu"), L.Dense(CLASSES)]


def chain(model: Any, x: Any, training: Any = None) -> Any:
    for part in model.parts:
        x = part(x)
    return x


def with_skips(model: Any, x: Any, training: Any = None) -> Any:
    """An early output is used by every later layer, and by what is no layer."""
    first = model.parts[0](x)
    second = model.parts[1](first) + first
    third = tf.concat([model.parts[2](second), first * 2.0], 1)
    return model.parts[3](third) + tf.reduce_mean(second, 1, keepdims=True)


def convolutions(model: Any) -> None:
    model.conv, model.norm, model.pool = L.Conv2D(8, 3), L.BatchNormalization(), L.GlobalAveragePooling2D()
    model.hidden, model.last = L.Dense(16, activation="relu"), L.Dense(CLASSES)


def see(model: Any, x: Any, training: Any = None) -> Any:
    x = tf.nn.relu(model.norm(model.conv(x), training=training))
    return model.last(model.hidden(model.pool(x)))


def language(model: Any) -> None:
    """An embedding with a mask, which goes with its output to another stage, and is used again for the output."""
    model.embedding, model.recurrent = L.Embedding(20, 8, mask_zero=True), L.LSTM(8, return_sequences=True)
    model.both, model.last = L.Bidirectional(L.SimpleRNN(4)), L.Dense(CLASSES)


def read(model: Any, x: Any, training: Any = None) -> Any:
    return model.last(model.both(model.recurrent(model.embedding(x))))


class Block(tf.keras.layers.Layer):  # type: ignore[misc]
    """A layer of layers, with an integer among its outputs."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.attention, self.norm = L.MultiHeadAttention(2, 4), L.LayerNormalization()
        self.mlp = tf.keras.Sequential([L.Dense(size * 2, activation="gelu"), L.Dense(size)])

    def call(self, given: dict[str, Any]) -> dict[str, Any]:
        x, count = given["x"], given["count"]
        x = x + self.attention(x, x)
        return {"x": self.norm(x + self.mlp(x)), "count": count + 1}


def transformer(model: Any) -> None:
    model.embedding, model.blocks = L.Embedding(20, 8), {str(i): Block(8) for i in range(3)}
    model.last = L.Dense(CLASSES)


def attend(model: Any, x: Any, training: Any = None) -> Any:
    state = {"x": model.embedding(x), "count": tf.constant([0])}
    for name in sorted(model.blocks):
        state = model.blocks[name](state)
    mean = tf.reduce_mean(state["x"], 1)
    return model.last(mean) * tf.cast(state["count"], mean.dtype)


def tied(model: Any) -> None:
    model.parts = [L.Dense(8, activation="tanh"), L.Dense(8), L.Dense(CLASSES)]


def tied_call(model: Any, x: Any, training: Any = None) -> Any:
    """The first layer is called again at the end, so that the pipeline goes back to its stage."""
    first, second, last = model.parts
    return last(first(second(first(x))))


def functional(model: Any) -> None:
    given = tf.keras.Input((8,))
    inner = L.Dense(16, activation="relu")(given)
    model.inner = tf.keras.Model(given, L.Dense(16)(inner) + inner)
    model.outer = tf.keras.Sequential([L.Dense(16, activation="tanh"), L.Dense(CLASSES)])


def nested(model: Any, x: Any, training: Any = None) -> Any:
    return model.outer(model.inner(x))


def pinned(model: Any) -> None:
    """The second stage comes first."""
    with smp.partition(1):
        model.first, model.other = L.Dense(16, activation="tanh"), L.Dense(16)
        with smp.partition(0):
            model.second = L.Dense(16)
    model.last = L.Dense(CLASSES)


def pinned_call(model: Any, x: Any, training: Any = None) -> Any:
    x = model.second(model.first(x)) + model.other(x)
    with smp.partition(0):
        return model.last(x)


def frozen(model: Any) -> None:
    dense(model)
    model.parts[0].trainable = False


def legacy() -> Any:
    return tf.keras.optimizers.legacy.SGD(0.1, momentum=0.9)


def regularized(model: Any) -> None:
    """Losses of weights and of activities, on every stage."""
    about = {"kernel_regularizer": "l2", "activity_regularizer": tf.keras.regularizers.L2(1e-3)}
    model.parts = [L.Dense(16, activation="tanh", **about) for _ in range(3)] + [L.Dense(CLASSES, **about)]


def headless(model: Any) -> None:
    """The last stage, which computes the outputs, trains nothing."""
    dense(model)
    model.parts[2].trainable = model.parts[3].trainable = False


def masked(model: Any) -> None:
    model.embedding, model.attention = L.Embedding(20, 8, mask_zero=True), L.MultiHeadAttention(2, 4)
    model.norm, model.pool, model.last = L.LayerNormalization(), L.GlobalAveragePooling1D(), L.Dense(CLASSES)


def attend_masked(model: Any, x: Any, training: Any = None) -> Any:
    x = model.embedding(x)
    return model.last(model.pool(model.norm(x + model.attention(x, x))))


def sequential(model: Any) -> None:
    """Without the shape of its input, and one that has its weights before the first step."""
    model.first = tf.keras.Sequential([L.Dense(16, activation="tanh"), L.Dense(16)])
    model.second = tf.keras.Sequential([tf.keras.Input((16,)), L.Dense(16, activation="relu"), L.Dense(CLASSES)])


def in_turn(model: Any, x: Any, training: Any = None) -> Any:
    return model.second(model.first(x))


def borrowing(model: Any) -> None:
    """The last layer uses the weights of the first."""
    model.embedding, model.hidden = L.Embedding(20, 8), L.Dense(8)
    model.pool, model.last = L.GlobalAveragePooling1D(), L.Dense(CLASSES)
    model.scores = L.Lambda(lambda x: tf.matmul(x, model.embedding.embeddings, transpose_b=True))


def borrow(model: Any, x: Any, training: Any = None) -> Any:
    return model.last(model.scores(model.hidden(model.pool(model.embedding(x)))))


def half(model: Any) -> None:
    sizes = (16, 16, 16, CLASSES)
    model.parts = [L.Dense(size, activation="tanh", dtype="mixed_float16") for size in sizes]


def scaled() -> Any:
    """The first steps overflow: they are to be skipped by all stages."""
    return tf.keras.mixed_precision.LossScaleOptimizer(tf.keras.optimizers.SGD(0.05), initial_scale=2.0**24)


def clipped() -> Any:
    return tf.keras.optimizers.SGD(0.5, global_clipnorm=0.2)


def clipped_legacy() -> Any:
    return tf.keras.optimizers.legacy.SGD(0.5, global_clipnorm=0.2)


CASES = {
    "dense": Case(dense, chain, vectors),
    "skips": Case(dense, with_skips, vectors),
    "legacy": Case(dense, chain, vectors, legacy),
    "images": Case(convolutions, see, images, microbatched=True),
    "words": Case(language, read, words),
    "transformer": Case(transformer, attend, words, lambda: tf.keras.optimizers.SGD(1e-2)),
    "tied": Case(tied, tied_call, vectors),
    "nested": Case(functional, nested, vectors),
    "pinned": Case(pinned, pinned_call, vectors),
    "frozen": Case(frozen, chain, vectors),
    "headless": Case(headless, chain, vectors),
    "regularized": Case(regularized, chain, vectors),
    "masked": Case(masked, attend_masked, words),
    "sequential": Case(sequential, in_turn, vectors),
    "borrowing": Case(borrowing, borrow, words),
    "clipped": Case(dense, with_skips, vectors, clipped),
    "clipped_legacy": Case(dense, with_skips, vectors, clipped_legacy),
    "scaled": Case(half, chain, vectors, scaled, microbatched=True, close=(1e-2, 1e-2)),
}


# --- training


def loss_of(case: Case, model: Any, x: Any, y: Any) -> Any:
    loss = case.loss(model(x, training=True), y)
    return tf.add_n([loss, *model.losses]) if case.build is regularized else loss


def make(case: Case, kind: type) -> Any:
    def construct(self: Any) -> None:
        kind.__init__(self)  # type: ignore[misc]
        case.build(self)

    model = type("Model", (kind,), {"__init__": construct, "call": case.call})
    tf.keras.utils.set_random_seed(7)
    return model()


def batches(case: Case) -> list[tuple[Any, Any]]:
    random = np.random.RandomState(0)
    size = BATCH * smp.dp_size()
    return [(case.data(random, size), random.randint(0, CLASSES, size)) for _ in range(STEPS)]


def by_tape_scaled(case: Case, model: Any, optimizer: Any, x: Any, y: Any) -> tuple[list[Any], Any]:
    with tf.GradientTape() as tape:
        loss = loss_of(case, model, x, y)
        multiplied = optimizer.get_scaled_loss(loss)
    return optimizer.get_unscaled_gradients(tape.gradient(multiplied, model.trainable_variables)), loss


def by_get_gradients(case: Case, model: Any, optimizer: Any, x: Any, y: Any) -> tuple[list[Any], Any]:
    loss = loss_of(case, model, x, y)
    return optimizer.get_gradients(loss, model.trainable_variables), loss


def by_compute_gradients(case: Case, model: Any, optimizer: Any, x: Any, y: Any) -> tuple[list[Any], Any]:
    loss = loss_of(case, model, x, y)
    return [gradient for gradient, _ in optimizer.compute_gradients(loss, model.trainable_variables)], loss


def by_tape(case: Case, model: Any, optimizer: Any, x: Any, y: Any) -> tuple[list[Any], Any]:
    if hasattr(optimizer, "get_scaled_loss"):
        return by_tape_scaled(case, model, optimizer, x, y)
    with tf.GradientTape() as tape:
        loss = loss_of(case, model, x, y)
    return tape.gradient(loss, model.trainable_variables), loss


def split(case: Case, gradients: Any) -> tuple[list[float], Any, Any]:
    model, optimizer = make(case, smp.DistributedModel), case.optimizer()

    @smp.step
    def get_grads(x: Any, y: Any) -> Any:
        return gradients(case, model, optimizer, x, y)

    @tf.function  # type: ignore[untyped-decorator]
    def train_step(x: Any, y: Any) -> Any:
        found, loss = get_grads(x, y)
        optimizer.apply_gradients(zip([g.accumulate() for g in found], model.trainable_variables))
        return loss.reduce_mean()

    mine = slice(smp.dp_rank() * BATCH, (smp.dp_rank() + 1) * BATCH)
    losses = [float(train_step(x[mine], y[mine])) for x, y in batches(case)]
    return losses, model, optimizer


def whole(case: Case) -> tuple[list[float], list[tuple[str, Any]]]:
    """Losses, and each weight with its name. Microbatches only where they make a difference; of all replicas' batches
    together.
    """
    model, optimizer = make(case, tf.keras.Model), case.optimizer()
    count = smp.state.cfg.microbatches if case.microbatched else 1

    @tf.function  # type: ignore[untyped-decorator]
    def train_step(x: Any, y: Any) -> Any:
        sums: Any = None
        losses = []
        for one, label in zip(tf.split(x, count), tf.split(y, count)):
            found, loss = by_tape(case, model, optimizer, one, label)
            losses.append(loss)
            sums = found if sums is None else [a + b for a, b in zip(sums, found)]
        optimizer.apply_gradients(zip([tf.convert_to_tensor(g) / count for g in sums], model.trainable_variables))
        return tf.add_n(losses) / count

    losses = [float(train_step(x, y)) for x, y in batches(case)]
    return losses, [(variable.name, variable.numpy()) for variable in model.weights]


def compare(name: str, gradients: Any) -> None:
    case = CASES[name]
    losses, model, optimizer = split(case, gradients)
    if hasattr(optimizer, "loss_scale"):
        scales = set(smp.allgather(float(optimizer.loss_scale)))
        assert len(scales) == 1 and scales.pop() < 2.0**20, scales
    expected, plain = smp.allgather(None if smp.rank() else whole(case))[0]
    if smp.dp_size() == 1:
        np.testing.assert_allclose(losses, expected, rtol=0, atol=case.close[0], err_msg=name)
    else:  # a replica's loss is of its share
        mean = np.mean(smp.allgather(losses, smp.DP_GROUP), 0)
        np.testing.assert_allclose(mean, expected, rtol=0, atol=case.close[0], err_msg=name)
    everybody = smp.allgather({place: v.numpy() for place, v in mine(model)}, smp.PP_GROUP)
    weights: dict[int, Any] = {place: value for found in everybody for place, value in found.items()}
    assert len(weights) == len(plain) == sum(map(len, everybody)), (name, sorted(weights))
    for place, (variable, value) in enumerate(plain):
        np.testing.assert_allclose(weights[place], value, rtol=0, atol=case.close[1], err_msg=f"{name} {variable}")
    if name != "pinned":
        assert len(everybody) == 1 or min(map(len, everybody)) > 0, f"{name}: a stage has no weights"


def mine(model: Any) -> list[tuple[int, Any]]:
    here = {id(variable) for variable in model.variables}
    return [(place, variable) for place, variable in enumerate(model.all_weights) if id(variable) in here]


WAYS = {"get": by_get_gradients, "compute": by_compute_gradients, "tape": by_tape}
for word in sys.argv[2:]:
    name, _, way = word.partition(":")
    compare(name, WAYS[way or "tape"])
print("equal\n", end="", flush=True)  # one write: mpirun mixes what several make of it
