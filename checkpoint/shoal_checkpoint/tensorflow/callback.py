"""Saves inside `Model.fit`, and lets it begin in the middle of an epoch."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from shoal_checkpoint.tensorflow import storage
from shoal_checkpoint.tensorflow.keras_release import keras_release


class SavingCallback(tf.keras.callbacks.Callback):  # type: ignore[misc]
    """Counts and saves for a Checkpoint. `skipped` batches are not in the dataset; `metrics` are after them."""

    def __init__(self, checkpoint: Any, skipped: int, metrics: list[Any]) -> None:
        super().__init__()
        self._checkpoint, self._skipped, self._metrics = checkpoint, skipped, metrics

    def make_metrics(self, model: Any, dataset: Any) -> None:
        """Makes the variables of the compiled metrics, which they have only after a batch: here one of zeros.

        Reading the dataset would change its order: `shuffle` has another one each time that it is read.
        """
        inputs, targets, *weights = tf.nest.map_structure(
            lambda spec: tf.zeros([size or 1 for size in spec.shape], spec.dtype), dataset.element_spec
        )
        outputs = model(inputs, training=False)
        model.compute_loss(inputs, targets, outputs, *weights)
        model.compute_metrics(inputs, targets, outputs, *(weights or [None]))
        model.reset_metrics()

    def on_train_begin(self, logs: Any = None) -> None:
        """Has `fit` of Keras 2 ask this object where it begins. It asks BackupAndRestore in the same way."""
        if self._skipped and keras_release() == 2:
            self.model._training_state = self

    def maybe_load_initial_counters_from_ckpt(self, steps_per_epoch: Any, epoch: int, mode: Any) -> tuple[int, int]:
        return epoch, self._skipped

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Sets the metrics, which Keras has just reset."""
        if self._skipped:
            storage.set_metrics(self.model, self._metrics)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Saves before the next batch, not after the last one."""
        self._checkpoint.save_if_due()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._checkpoint.end_step(batch + 1)

    def on_train_end(self, logs: Any = None) -> None:
        if self._skipped and keras_release() == 2:
            self.model._training_state = None


class LateCallbacks(tf.keras.callbacks.CallbackList):  # type: ignore[misc]
    """The callbacks of an epoch without its first batches in the dataset: gives them the numbers of the others.

    `Model.fit` of Keras 3 begins at 0, and takes such a list in place of callbacks.
    """

    def __init__(self, skipped: int, callbacks: list[Any], steps: int, epochs: int, model: Any, verbose: Any) -> None:
        self._skipped = skipped
        shown: dict[str, Any] = {"verbose": "auto" if verbose is None else verbose, "epochs": epochs}
        shown |= {"steps": steps if steps >= 0 else None, "add_progbar": verbose != 0}
        super().__init__(callbacks, add_history=True, model=model, **shown)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        super().on_train_batch_begin(batch + self._skipped, logs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        super().on_train_batch_end(batch + self._skipped, logs)
