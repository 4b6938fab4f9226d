"""Callbacks for `tf.keras.Model.fit`: they broadcast variables, average metrics, and warm up the learning rate.

All ranks pass the same ones, in the same order.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from smdistributed.dataparallel.tensorflow.collectives import broadcast_variables, oob_allreduce
from smdistributed.dataparallel.tensorflow.job import rank, size

__all__ = ["BroadcastGlobalVariablesCallback", "LearningRateWarmupCallback", "MetricAverageCallback"]


class BroadcastGlobalVariablesCallback(tf.keras.callbacks.Callback):  # type: ignore[misc]
    """Sets all weights and optimizer variables to the values of one rank, after the first batch: then all exist.

    Seeds stay: each rank has its own dropout.

    Args:
        root_rank: The rank, from 0.
    """

    def __init__(self, root_rank: int) -> None:
        super().__init__()
        self._root_rank, self._done = root_rank, False

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._done:
            return
        self._done = True
        variables = self.model.optimizer.variables
        of_optimizer = variables() if callable(variables) else variables  # a method in legacy optimizers
        broadcast_variables([*self.model.weights, *of_optimizer], self._root_rank)


class MetricAverageCallback(tf.keras.callbacks.Callback):  # type: ignore[misc]
    """Averages an epoch's metrics over the ranks. Put it before callbacks that read them, such as EarlyStopping."""

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Replaces each value of `logs` by its mean over the ranks. All ranks need the same names."""
        if not logs:
            return
        names = sorted(logs)
        means = oob_allreduce([tf.cast(logs[name], tf.float64) for name in names])
        logs.update({name: mean.numpy() if mean.shape.rank else float(mean) for name, mean in zip(names, means)})


class LearningRateWarmupCallback(tf.keras.callbacks.Callback):  # type: ignore[misc]
    """Raises the learning rate from `initial_lr / size()` to `initial_lr`, step by step, over the first epochs.

    By the linear scaling rule (Goyal et al., 2017), with size() times the batch `initial_lr` is size() times the rate
    for one rank.

    Args:
        initial_lr: The learning rate after the warmup.
        warmup_epochs: Its length in epochs.
        steps_per_epoch: Needed if `fit` cannot know it.
        verbose: 1 prints the learning rate after each epoch, on rank 0.

    Raises:
        ValueError: In `fit`, if the optimizer has a schedule, or the steps of an epoch are not known.
    """

    def __init__(
        self, initial_lr: float, warmup_epochs: float = 5, steps_per_epoch: int | None = None, verbose: int = 0
    ) -> None:
        super().__init__()
        self._target, self._epochs, self._steps, self._verbose = initial_lr, warmup_epochs, steps_per_epoch, verbose
        self._epoch = 0

    def on_train_begin(self, logs: Any = None) -> None:
        optimizer = getattr(self.model.optimizer, "inner_optimizer", self.model.optimizer)
        rate = getattr(optimizer, "_learning_rate", None)
        rate = optimizer.learning_rate if rate is None else rate  # legacy optimizers lack the private one
        if callable(rate):  # a schedule of Keras, or a function
            raise ValueError(
                f"LearningRateWarmupCallback: the optimizer has a schedule ({type(rate).__name__}), which sets the "
                "rate at each step. Fix: give the optimizer a number, or warm up in the schedule."
            )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Sets the rate, during the warm-up. Raises ValueError if the number of steps is not known."""
        steps = self._steps or (self.params or {}).get("steps")
        if not steps:
            raise ValueError("LearningRateWarmupCallback: fit does not know its steps. Fix: pass steps_per_epoch.")
        at = self._epoch + batch / steps
        if at >= self._epochs + 1 / steps:
            return
        share = min(at / self._epochs, 1.0) if self._epochs else 1.0
        self.model.optimizer.learning_rate.assign(self._target * (1 + share * (size() - 1)) / size())

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self._verbose and epoch < self._epochs and rank() == 0:
            print(f"Epoch {epoch + 1}: the learning rate is {float(self.model.optimizer.learning_rate):g}.")
