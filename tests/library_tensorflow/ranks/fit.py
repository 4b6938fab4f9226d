"""A rank: `Model.fit` on its share of the digits, with all callbacks. Ends with `equal` and the engine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits
from tests.library_tensorflow.ranks.printing import print_line

import smdistributed.dataparallel.tensorflow as sdp
import smdistributed.dataparallel.tensorflow.keras as sdk
from smdistributed.core.tensorflow.keras_release import is_keras_3

sdk.init()
RANK, SIZE = sdk.rank(), sdk.size()
images, labels = load_digits(return_X_y=True)
train, test = slice(RANK, 1500 // SIZE * SIZE, SIZE), slice(1500, None)
tf.keras.utils.set_random_seed(RANK)
model = tf.keras.Sequential(
    [
        tf.keras.Input((64,)),
        tf.keras.layers.Dense(64, activation="relu"),
        tf.keras.layers.Dropout(0.1),
        tf.keras.layers.Dense(10),
    ]
)
model.compile(
    optimizer=sdk.DistributedOptimizer(tf.keras.optimizers.Adam(1e-3)),
    loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
rates: list[float] = []
history = model.fit(
    images[train] / 16,
    labels[train],
    batch_size=50,  # the last batch is smaller
    epochs=12,
    verbose=0,
    validation_data=(images[test] / 16, labels[test]),
    callbacks=[
        sdk.callbacks.BroadcastGlobalVariablesCallback(0),
        sdk.callbacks.LearningRateWarmupCallback(initial_lr=1e-3 * SIZE, warmup_epochs=2, verbose=1),
        sdk.callbacks.MetricAverageCallback(),
        tf.keras.callbacks.LambdaCallback(
            on_batch_end=lambda batch, logs: rates.append(float(model.optimizer.learning_rate))
        ),
    ],
)
assert history.history["val_accuracy"][-1] > 0.85, history.history
assert abs(rates[0] - 1e-3) < 1e-9 and abs(rates[-1] - 1e-3 * SIZE) < 1e-9 and rates == sorted(rates)
for values in (*model.get_weights(), np.array(history.history["loss"]), np.array(history.history["val_accuracy"])):
    np.testing.assert_array_equal(sdp.broadcast(tf.constant(values), 0).numpy(), values)
saved = Path(sys.argv[1]) / f"model-{RANK}.keras"
model.save(saved)
loaded = tf.keras.models.load_model(saved)
assert type(loaded.optimizer) is tf.keras.optimizers.Adam  # nothing of ours is in the file
for value, again in zip(model.get_weights(), loaded.get_weights()):
    np.testing.assert_array_equal(value, again)
again = sdk.load_model(saved)
again.fit(images[train][:100] / 16, labels[train][:100], batch_size=50, verbose=0)
for values in again.get_weights():  # its optimizer goes on as that of all ranks
    np.testing.assert_array_equal(sdp.broadcast(tf.constant(values), 0).numpy(), values)


def callbacks(directory: Path) -> list[Any]:
    """Keras' own that need nothing from outside."""
    own = tf.keras.callbacks
    return [
        own.ModelCheckpoint(directory / "{epoch}.weights.h5", save_weights_only=True),
        own.EarlyStopping("loss", patience=9, restore_best_weights=True),
        own.ReduceLROnPlateau("loss", patience=1, min_delta=9, factor=0.5),
        own.CSVLogger(directory / "log.csv"),
        own.TensorBoard(directory / "logs", write_graph=False),
        own.BackupAndRestore(directory / "backup"),
        own.TerminateOnNaN(),
    ]


def fitted(normalization: Any, size: int, scale: float | None, called: list[Any]) -> tuple[Any, Any]:
    """A model after some epochs, and their losses; of all ranks, or of this process alone."""
    mine = slice(RANK % size, None, size)
    drawn = np.random.RandomState(0)
    x, y = drawn.standard_normal((96, 6)), drawn.standard_normal((96, 2))
    tf.keras.utils.set_random_seed(1)
    layers = [tf.keras.Input((6,)), tf.keras.layers.Dense(8), normalization(momentum=0.5), tf.keras.layers.ReLU()]
    trained = tf.keras.Sequential([*layers, tf.keras.layers.Dense(2, dtype="float32")])
    optimizer: Any = tf.keras.optimizers.SGD(0.1)
    if scale:
        optimizer = tf.keras.mixed_precision.LossScaleOptimizer(optimizer, initial_scale=scale)
    if size > 1:
        optimizer = sdk.DistributedOptimizer(optimizer)
        called = [sdk.callbacks.BroadcastGlobalVariablesCallback(0), sdk.callbacks.MetricAverageCallback(), *called]
    trained.compile(optimizer, "mse", metrics=["mae"])
    fitted = trained.fit(
        *(x[mine], y[mine]),
        batch_size=24 // size,
        epochs=3,
        shuffle=False,
        verbose=0,
        callbacks=called,
    )
    return trained, fitted.history


def against_plain_keras(scale: float | None, tolerance: float, called: list[Any]) -> Any:
    """The ranks' batches together are those of one process with Keras alone."""
    ours, losses = fitted(sdp.SyncBatchNormalization, SIZE, scale, called)
    lr = tf.keras.callbacks.ReduceLROnPlateau("loss", patience=1, min_delta=9, factor=0.5)
    plain, expected = fitted(tf.keras.layers.BatchNormalization, 1, scale, [lr] if called else [])
    for value, other in zip(ours.get_weights(), plain.get_weights()):
        np.testing.assert_allclose(value, other, atol=tolerance)
    for name in expected:
        np.testing.assert_allclose(losses[name], expected[name], atol=tolerance)
    return ours


directory = Path(sys.argv[1]) / f"{RANK}"
directory.mkdir()
whole = against_plain_keras(None, 1e-5, callbacks(directory))
(whole.export if is_keras_3() else whole.save)(directory / "model")  # a SavedModel
exported = tf.saved_model.load(directory / "model")
x = np.ones([3, 6], np.float32)
np.testing.assert_allclose(exported.serve(x) if is_keras_3() else exported(x), whole(x), atol=1e-6)
whole.save(directory / "model.keras")
np.testing.assert_allclose(tf.keras.models.load_model(directory / "model.keras")(x), whole(x), atol=1e-6)
tf.keras.mixed_precision.set_global_policy("mixed_float16")
against_plain_keras(128.0, 1e-2, [])
tf.keras.mixed_precision.set_global_policy("float32")
model.compile(sdk.DistributedOptimizer(tf.keras.optimizers.SGD()), "mse", jit_compile=True)
try:
    model.fit(images[:2], np.zeros([2, 10]), verbose=0)
except Exception as error:
    assert "leave jit_compile=True out" in str(error), error
else:
    raise AssertionError("XLA cannot communicate")
model.compile(
    sdk.DistributedOptimizer(tf.keras.optimizers.SGD(tf.keras.optimizers.schedules.ExponentialDecay(1.0, 1, 0.9)))
)
try:
    model.fit(images[:2], labels[:2], callbacks=[sdk.callbacks.LearningRateWarmupCallback(1.0)], verbose=0)
except ValueError as error:
    assert "ExponentialDecay" in str(error)
else:
    raise AssertionError("a schedule cannot be warmed up")
print_line("equal")
