"""A rank: `Model.fit` on its share of the digits, with all callbacks. Ends with `equal` and the engine."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits
from tests.library_tensorflow.ranks.told import tell

import smdistributed.dataparallel.tensorflow as sdp
import smdistributed.dataparallel.tensorflow.keras as sdk

sdk.init()
RANK, SIZE = sdk.rank(), sdk.size()
images, labels = load_digits(return_X_y=True)
train, test = slice(RANK, 1500 // SIZE * SIZE, SIZE), slice(1500, None)
tf.keras.utils.set_random_seed(RANK)
model = tf.keras.Sequential(
    [
        tf.keras.layers.Dense(64, activation="relu", input_shape=(64,)),
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
model.compile(
    sdk.DistributedOptimizer(tf.keras.optimizers.SGD(tf.keras.optimizers.schedules.ExponentialDecay(1.0, 1, 0.9)))
)
try:
    model.fit(images[:2], labels[:2], callbacks=[sdk.callbacks.LearningRateWarmupCallback(1.0)], verbose=0)
except ValueError as error:
    assert "ExponentialDecay" in str(error)
else:
    raise AssertionError("a schedule cannot be warmed up")
tell("equal")
