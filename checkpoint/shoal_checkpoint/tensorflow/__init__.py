"""Saves and resumes a TensorFlow or Keras training exactly: the losses equal those without an interruption.

    tf.keras.backend.experimental.enable_tf_random_generator()  # Keras 2, before the model: dropout can then be saved
    checkpoint = Checkpoint("/opt/ml/checkpoints", every=100, model=model, ranks=sdp)
    for epoch in checkpoint.epochs(10):
        checkpoint.fit(make_dataset(epoch), callbacks=...)  # or a loop over checkpoint.batches(make_dataset(epoch))

Importing does nothing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from shoal_checkpoint import STOPPED, position, seconds_left
from shoal_checkpoint.directories import CheckpointError, SavedSteps
from shoal_checkpoint.tensorflow import storage
from shoal_checkpoint.tensorflow.keras_release import keras_release, require_tensorflow_backend
from shoal_checkpoint.tensorflow.random_states import RandomStates
from shoal_checkpoint.tensorflow.ranks import Ranks, share_samples, weigh_samples

__all__ = ["Checkpoint", "CheckpointError"]

_STEPS_BETWEEN_AGREEMENTS = 10


class Checkpoint:
    """Loads the newest checkpoint of a directory, counts the steps of the training, and saves.

    All ranks make it with the same arguments, after everything that it saves. Rank 0 reads and writes the files, so the
    other hosts need not see the directory. The variables must be equal on all ranks.

    After SIGTERM it saves and ends the process with exit code 143 (`STOPPED`). Several ranks agree on the step at every
    10th, and at the end of the epoch.

    Args:
        directory: Where the checkpoints are. None: nothing is saved or loaded.
        model: A Keras model. Its compiled optimizer and metrics are saved too.
        every: Save after this number of steps. None: after each epoch.
        keep: The number of newest checkpoints that are kept.
        ranks: The module through which the ranks communicate, such as `smdistributed.dataparallel.tensorflow` or
            `horovod.tensorflow`, initialised. None: this process trains alone.
        objects: Other objects to save, by name: an `optimizer=` of your own loop, and other trackable objects, such as
            tf.Variable.

    Raises:
        CheckpointError: If the newest checkpoint cannot be used, as one of another release of Keras, or another job
            writes to the directory. The message names the file, the problem and a fix. Nothing is overwritten. All
            ranks raise it. Also if Keras 3 has another backend than TensorFlow.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None,
        *,
        model: Any,
        every: int | None = None,
        keep: int = 2,
        ranks: Any = None,
        **objects: Any,
    ) -> None:
        position.check_every(every)
        require_tensorflow_backend()
        self.epoch = 0
        """The current epoch, from 0."""
        self.step = 0
        """The number of steps that the training has ended, of all epochs."""
        self.weight = 1.0
        """The factor for the mean loss of the current batch, with `global_batch`. 1 with equal shares."""
        self._every = every
        self._model = model
        self._ranks = Ranks(ranks)
        self._directory = None if directory is None else SavedSteps(directory, keep)
        self._random = RandomStates(model)
        optimizer = objects.pop("optimizer", None) or getattr(model, "optimizer", None)
        self._objects = {"model": model, **({"optimizer": optimizer} if optimizer is not None else {}), **objects}
        self._batches = 0  # of this epoch, that the training has consumed on this rank
        self._unit: int | None = None  # samples of a batch of all ranks; None: unknown
        self._resumed: dict[str, Any] | None = None  # until the first batches of the epoch
        self._saved_step: int | None = None
        self._due = self._stopping = False  # save, and stop, before the next batch
        if self._directory is not None:
            seconds_left()
            if self._ranks.rank == 0 and self._random.is_incomplete:
                print(f"shoal: {self._random.is_incomplete}", file=sys.stderr, flush=True)
            self._load(self._directory)

    def epochs(self, count: int) -> Iterator[int]:
        """Yields the numbers of the epochs that are still to be trained, from the current one to count - 1.

        Saves at the end of the training, and after each epoch if `every` is None.
        """
        if self._resumed is not None:
            self._random.set(self._resumed["random"])
        if self._ranks.rank == 0:
            position.warn_if_nothing_is_left(self.epoch, count)
        while self.epoch < count:
            yield self.epoch
            self.epoch += 1
            self._batches = 0
            self._agree_to_stop()
            self._due = self._due or self._every is None or self.epoch >= count
            self.save_if_due()

    def batches(self, dataset: Any, batch_size: int | None = None, global_batch: int | None = None) -> Iterator[Any]:
        """Yields this epoch's batches that are still to be trained. Saves between two batches.

        Args:
            dataset: A tf.data.Dataset of the epoch's batches. Its order must follow from the epoch: shuffle it with
                `seed=seed + epoch`. With `global_batch`: single samples, all of them on each rank in the same order.
            batch_size: The number of samples in a batch of this rank. Needed to go on with another number of ranks.
            global_batch: The number of samples in a step, which all ranks share. So the steps are the same with any
                number of ranks. Multiply the mean loss of each batch by `weight`.

        Raises:
            CheckpointError: If the checkpoint is at a place in the epoch where now no batch begins.
        """
        unit = self._samples_per_step(batch_size, global_batch)
        if global_batch is None:
            yield from self._save_between(self._rest_of(dataset, unit))
            return
        shares = share_samples(dataset, global_batch, self._ranks.rank, self._ranks.size)
        for batch, weight in self._save_between(self._rest_of(shares, unit)):
            self.weight = float(weight)
            yield batch

    def _save_between(self, batches: Any) -> Iterator[Any]:
        for batch in batches:
            self.save_if_due()
            yield batch
            self.end_step(self._batches + 1)

    def _samples_per_step(self, batch_size: int | None, global_batch: int | None) -> int | None:
        if global_batch is None:
            return None if batch_size is None else batch_size * self._ranks.size
        if batch_size is not None:
            raise ValueError("batch_size and global_batch exclude each other. Fix: give global_batch alone")
        position.check_global_batch(global_batch)
        return global_batch

    def _rest_of(self, dataset: Any, unit: int | None) -> Any:
        """Returns the batches that are still to be trained. `unit`: the samples in a batch of all ranks, if known."""
        self._unit = unit
        resumed, self._resumed = self._resumed, None
        if resumed is None or not resumed["batches"]:
            return dataset
        length = len(dataset) * unit if unit is not None and int(dataset.cardinality()) >= 0 else None
        self._batches = position.batches_to_skip(resumed, unit, self._ranks.size, length)
        return dataset.skip(self._batches)

    def fit(
        self,
        dataset: Any,
        batch_size: int | None = None,
        callbacks: Sequence[Any] = (),
        global_batch: int | None = None,
        **given: Any,
    ) -> Any:
        """Calls `Model.fit` for the rest of this epoch, and saves in it.

        Callbacks get the numbers of epochs and batches, and the epoch's metrics, as in an uninterrupted run.

        Args:
            dataset: See `batches`.
            batch_size: See `batches`.
            callbacks: Keras callbacks.
            global_batch: See `batches`. The weights are passed as sample weights, so the loss needs no factor.
            given: Other arguments of `Model.fit`, except `epochs` and `initial_epoch`.

        Returns:
            The history of the epoch.
        """
        from shoal_checkpoint.tensorflow.callback import LateCallbacks, SavingCallback

        unit = self._samples_per_step(batch_size, global_batch)
        if global_batch is not None:
            shares = share_samples(dataset, global_batch, self._ranks.rank, self._ranks.size)
            dataset = shares.map(weigh_samples)
        metrics = (self._resumed or {}).get("metrics") or []
        rest = self._rest_of(dataset, unit)
        saving = SavingCallback(self, self._batches, metrics)
        called: Any = [*callbacks, saving]
        if self._batches:
            saving.make_metrics(self._model, dataset)
            steps = int(dataset.cardinality())
            if keras_release() == 3:
                called = LateCallbacks(self._batches, called, steps, self.epoch + 1, self._model, given.get("verbose"))
            elif steps >= 0:
                rest = rest.apply(tf.data.experimental.assert_cardinality(steps))
        epochs = {"initial_epoch": self.epoch, "epochs": self.epoch + 1}
        return self._model.fit(rest, callbacks=called, **epochs, **given)

    def end_step(self, batches: int) -> None:
        """Notes that a step has ended, after a number of batches of this epoch."""
        self.step += batches - self._batches
        self._batches = batches
        if self._every is not None and self.step % self._every == 0:
            self._due = True
        if self._ranks.size == 1 or self.step % _STEPS_BETWEEN_AGREEMENTS == 0:
            self._agree_to_stop()

    def _agree_to_stop(self) -> None:
        """Finds out whether any rank has received SIGTERM. A collective call."""
        if self._directory is not None and self._ranks.any(seconds_left() is not None):
            self._due = self._stopping = True

    def save_if_due(self) -> None:
        """Saves if it is time, and ends the process if it must stop. A collective call if it is time."""
        if not self._due:
            return
        self._due = False
        self.save()
        if self._stopping:
            self._ranks.barrier()  # mpirun ends the others if one ends
            raise SystemExit(STOPPED)

    def save(self) -> None:
        """Saves, unless this step is saved already. A collective call, between two steps.

        Raises:
            CheckpointError: On rank 0, if the checkpoint cannot be written. Older ones are intact.
        """
        if self._directory is None or self._saved_step == self.step:
            return
        of_ranks = self._ranks.gather(
            {"random": self._random.read(), "metrics": storage.read_metrics(self._model) if self._batches else []}
        )
        self._saved_step = self.step
        if self._ranks.rank != 0:
            return
        own = {
            "position": {"epoch": self.epoch, "step": self.step, "batches": self._batches, "unit": self._unit},
            "layout": storage.layout(self._objects),
            "ranks": of_ranks,
        }
        try:
            storage.write(self._objects, own, self._directory.begin(self.step))
            self._directory.publish(self.step)
        except (OSError, tf.errors.OpError) as error:
            raise self._directory.write_error(self.step, error) from error

    def _load(self, directory: SavedSteps) -> None:
        def load_newest() -> dict[str, Any] | None:
            directory.lock()
            if not (steps := directory.steps()):
                return None
            path = directory.path_of(steps[-1])
            try:
                own = storage.read(self._objects, path)
            except CheckpointError as error:
                raise CheckpointError(f"{path}: {error} {directory.advice(steps[-1])}") from error
            return {**own, "path": str(path)}

        own = self._ranks.from_first(load_newest)
        if own is None:
            return
        storage.build(self._objects)
        for each in storage.variables(self._objects):
            self._ranks.broadcast_variables(each)
        saved, rank, size = own["ranks"], self._ranks.rank, self._ranks.size
        place = own["position"]
        self.epoch, self.step, self._batches = (int(place[name]) for name in ("epoch", "step", "batches"))
        self._saved_step = self.step
        mine = saved[rank] if rank < len(saved) else {"random": self._random.derive(saved[0]["random"], rank)}
        self._resumed = {**place, "samples": None, "world_size": len(saved), **mine}
        if rank == 0:
            position.print_resume(own["path"], self.epoch, self._batches, len(saved), size)
