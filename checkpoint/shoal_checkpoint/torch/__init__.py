"""Saves and resumes a PyTorch training exactly: the losses after a restart equal the losses without one.

    checkpoint = Checkpoint("/opt/ml/checkpoints", every=100, model=model, optimizer=optimizer)
    for epoch in checkpoint.epochs(10):
        for images, labels in checkpoint.batches(loader):
            ...

Importing does nothing.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from shoal_checkpoint import STOPPED, position, seconds_left
from shoal_checkpoint.directories import CheckpointError, SavedSteps
from shoal_checkpoint.torch import parts, ranks, storage
from shoal_checkpoint.torch.batches import ExactLoader
from shoal_checkpoint.torch.pickles import UntrustedError
from shoal_checkpoint.torch.random_states import derive_random_states, read_random_states, set_random_states
from shoal_checkpoint.torch.ranks import StopAgreement
from shoal_checkpoint.torch.storage import BackgroundWriter

__all__ = ["Checkpoint", "CheckpointError", "StopAgreement"]


class Checkpoint:
    """Loads the newest checkpoint of a directory, counts the steps of the training, and saves.

    All ranks make it with the same arguments, after everything that it saves. Rank 0 reads and writes the files, so the
    other hosts need not see the directory. Parameters and the optimizer's state must be equal on all ranks, as in
    DistributedDataParallel, or sharded over them, as in FSDP or by tensor parallelism.

    After SIGTERM it saves and ends the process with exit code 143 (`STOPPED`). This happens before the next batch, or
    at the end of the epoch.

    Args:
        directory: Where the checkpoints are. None: nothing is saved or loaded.
        every: Save after this number of steps. None: after each epoch.
        keep: The number of newest checkpoints that are kept.
        asynchronous: Write in a background thread, from a copy in memory that is kept for the next save. The training
            waits for the copy only.
        weights_only: False: load any object, which runs code of the person who wrote the checkpoint. True: only
            numbers, texts, tensors, NumPy arrays and containers of them. None: True, unless SHOAL_TRUST_CHECKPOINTS is
            1.
        state: The objects to save, by name: `model=`, `optimizer=`, `scheduler=`, `scaler=`, and any other object with
            `state_dict` and `load_state_dict`. Also dicts, of which each rank has its own. They are updated in place.

    Raises:
        CheckpointError: If the newest checkpoint cannot be used, or another job writes to the directory. The message
            names the file, the problem and a fix. Nothing is overwritten. All ranks raise it.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None,
        *,
        every: int | None = None,
        keep: int = 2,
        asynchronous: bool = True,
        weights_only: bool | None = None,
        **state: Any,
    ) -> None:
        position.check_every(every)
        self.epoch = 0
        """The current epoch, from 0."""
        self.step = 0
        """The number of steps that the training has ended, of all epochs."""
        self._every, self._weights_only = every, weights_only
        self._has_saved = False
        self._state = parts.check(state)
        self._directory = None if directory is None else SavedSteps(directory, keep)
        self._writer = BackgroundWriter(asynchronous)
        self._stop = StopAgreement()
        self._loaders: dict[int, ExactLoader] = {}
        self._loader: ExactLoader | None = None
        self._batches = 0  # of this epoch, that the training has consumed on this rank
        self._unit: int | None = None  # samples of a batch of all ranks; None: unknown
        self._samples: int | None = None  # of this epoch, that all ranks have trained, with a global batch
        self._part: position.Part | None = None  # the batch that the training has now, with a global batch
        self._replicas = [each for each in state.values() if hasattr(each, "no_sync")]
        self._saved_step: int | None = None
        self._due = self._stopping = False  # save, and stop, before the next batch
        self._resumed: dict[str, Any] | None = None  # of this rank; until the first batches() has used it
        self._began: dict[str, Any] | None = None  # the random states at the beginning of this epoch's batches
        if self._directory is not None:
            seconds_left()
            self._load(self._directory)

    def epochs(self, count: int) -> Iterator[int]:
        """Yields the numbers of the epochs that are still to be trained, from the current one to count - 1.

        Saves at the end of the training, and after each epoch if `every` is None.
        """
        if self._resumed is not None and self._resumed["began"] is None:
            set_random_states(self._resumed["now"]["random"])
        if ranks.rank() == 0:
            position.warn_if_nothing_is_left(self.epoch, count)
        while self.epoch < count:
            yield self.epoch
            self.epoch += 1
            self._batches, self._samples, self._began = 0, None, None
            self._due = self._due or self._every is None or self.epoch >= count
            self._save_if_due()
        self._wait()

    def batches(self, loader: Any, accumulate: int = 1, global_batch: int | None = None) -> Iterator[Any]:
        """Yields this epoch's batches that are still to be trained. Saves between two batches.

        Sets the epoch of samplers that have one, such as DistributedSampler. In workers of the loader, random numbers
        follow from a seed for each batch, and with `global_batch` for each sample.

        Args:
            loader: A torch.utils.data.DataLoader. Its order must follow from the epoch and the random states. Each
                epoch has one loop over `batches`.
            accumulate: The number of batches of a step, if you accumulate gradients. Saves are between steps only.
            global_batch: The number of samples in a step, which all ranks share. So the steps are the same with any
                number of ranks. Then the loader is the same on all ranks, without a DistributedSampler, and its
                batch_size is the most that a rank takes at once. Multiply the mean loss of each batch by `weight`. Call
                `optimizer.step()` and `optimizer.zero_grad()` if `ends_step`. Models with `no_sync`, such as
                DistributedDataParallel, exchange gradients in the last batch of a step only.

        Raises:
            CheckpointError: If this loader has no boundary of batches at the checkpoint's place in the epoch.
            TypeError: If the loader is not torch's DataLoader, or its samples cannot be shared.
        """
        if self._began is not None:
            raise ValueError(f"epoch {self.epoch}: a second loop over batches(). Fix: have one in each epoch")
        if global_batch is not None and accumulate != 1:
            raise ValueError("accumulate and global_batch exclude each other. Fix: give global_batch alone")
        if id(loader) not in self._loaders:
            self._loaders[id(loader)] = ExactLoader(loader)
        self._loader = self._loaders[id(loader)]
        self._loader.set_epoch(self.epoch)
        resumed, self._resumed = self._resumed, None
        if resumed is not None:
            self._loader.set_generators((resumed["began"] or resumed["now"])["generators"])
            if resumed["began"] is None:
                resumed = None  # the epoch has not begun
        split = None
        if global_batch is not None:
            self._samples = 0 if resumed is None else position.samples_to_skip(resumed["position"])
            split = self._loader.split(self._samples, global_batch)
        batches = self._start_batches(self._loader, split, resumed)
        return self._count(batches, accumulate) if split is None else self._count_parts(batches, split)

    @property
    def weight(self) -> float:
        """The factor for the mean loss of the current batch, with `global_batch`. With equal shares 1 / batches."""
        return self._current_part.weight

    @property
    def ends_step(self) -> bool:
        """Whether the current batch is the last of a step. Raises ValueError outside a loop with `global_batch`."""
        return self._current_part.ends_step

    @property
    def _current_part(self) -> position.Part:
        if self._part is None:
            raise ValueError("weight and ends_step are of a batch. Fix: loop over batches(loader, global_batch=...)")
        return self._part

    def _start_batches(
        self, loader: ExactLoader, split: position.Split | None, resumed: dict[str, Any] | None
    ) -> Iterator[Any]:
        """Starts the loader at the epoch's beginning, or at a checkpoint's place, with that save's random states."""
        self._unit = loader.samples_per_batch(ranks.world_size()) if split is None else None
        if resumed is None:
            self._began = self._read_random_states()
            return loader.start(0, split)
        if split is None:
            self._batches = position.batches_to_skip(resumed["position"], self._unit, ranks.world_size(), loader.length)
        self._began = resumed["began"]
        set_random_states(self._began["random"])
        batches = loader.start(self._batches if split is None else 0, split)
        set_random_states(resumed["now"]["random"])
        return batches

    def _count(self, batches: Iterator[Any], accumulate: int) -> Iterator[Any]:
        """Yields the batches. The code after a yield runs when the script asks for the next batch."""
        open_batches = 0  # of a step that has not ended
        for batch in self._save_between(batches):
            yield batch
            self._batches += 1
            open_batches = (open_batches + 1) % accumulate
            if open_batches == 0:
                self._end_step()
        if open_batches:
            self._end_step()

    def _count_parts(self, batches: Iterator[Any], split: position.Split) -> Iterator[Any]:
        for batch, part in zip(self._save_between(batches), split):
            self._part = part
            with ExitStack() as local:
                for each in () if part.ends_step else self._replicas:
                    local.enter_context(each.no_sync())
                yield batch
            self._batches += 1
            if part.ends_step:
                self._samples = part.trained
                self._end_step()
        self._part = None

    def _save_between(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yields batches. A due save waits for the next, so that none is between the last and the epoch's end."""
        while True:
            before = self._read_random_states() if self._due else None  # loading a batch can draw, too
            try:
                batch = next(batches)
            except StopIteration:
                return
            self._save_if_due(before)
            yield batch

    def _end_step(self) -> None:
        self.step += 1
        self._stopping = self._directory is not None and self._stop.is_last(self.step)
        self._due = self._stopping or (self._every is not None and self.step % self._every == 0)

    def _save_if_due(self, random_states: dict[str, Any] | None = None) -> None:
        if self._due:
            self._due = False
            self.save(random_states)
            if self._stopping:
                self._wait()
                raise SystemExit(STOPPED)

    def _wait(self) -> None:
        """Waits until the checkpoint is on the disk. On all ranks: mpirun ends the others if one ends."""
        if self._directory is not None:
            ranks.from_first_rank(self._writer.wait)

    def save(self, random_states: dict[str, Any] | None = None) -> None:
        """Saves, unless this step is saved already. A collective call, between two steps.

        Args:
            random_states: For the helper itself.

        Raises:
            CheckpointError: On rank 0, if this checkpoint cannot be written, or in the background the one before.
        """
        if self._directory is None or self._saved_step == self.step:
            return
        now = random_states or self._read_random_states()
        own = {"began": self._began, "now": now, "dicts": parts.read_dicts(self._state)}
        of_ranks = ranks.gather(own)
        state = parts.read_shared(self._state)
        self._saved_step = self.step
        if ranks.rank() == 0:
            shared = {
                "kinds": parts.kinds(self._state),
                "position": {
                    "epoch": self.epoch,
                    "step": self.step,
                    "batches": self._batches,
                    "unit": self._unit,
                    "samples": self._samples,
                },
                "ranks": of_ranks,
            }
            tensors = storage.flatten({**state, "shoal": shared})
            self._warn_of_objects(tensors)
            self._writer.write(tensors, functools.partial(_write, self._directory, self.step))

    def _warn_of_objects(self, tensors: dict[str, torch.Tensor]) -> None:
        """At the first save, warn if loading it will require trust: afterwards it would be too late."""
        if not self._has_saved and self._weights_only is not False and (problem := storage.find_objects(tensors)):
            warnings.warn(f"this checkpoint will not be loaded: {problem}", stacklevel=2)
        self._has_saved = True

    def _read_random_states(self) -> dict[str, Any]:
        generators = [] if self._loader is None else self._loader.read_generators()
        return {"random": read_random_states(), "generators": generators}

    def _load(self, directory: SavedSteps) -> None:
        read: dict[str, torch.Tensor] = {}

        def read_newest() -> tuple[int, str] | None:
            directory.lock()
            if not (steps := directory.steps()):
                return None
            advice = directory.advice(steps[-1])
            try:
                read.update(storage.read(directory.path_of(steps[-1])))
            except CheckpointError as error:
                raise CheckpointError(f"{error} {advice}") from error
            return steps[-1], advice

        found = ranks.from_first_rank(read_newest)
        if found is None:
            return
        path = directory.path_of(found[0])
        try:
            state = storage.unflatten(ranks.broadcast_tensors(read), self._weights_only)
            shared = state.pop("shoal")
            position.check_place(shared["position"])
            parts.load(self._state, state, shared["kinds"])
            self._take(shared, path)
        except UntrustedError as error:
            raise CheckpointError(f"{path}: {error}") from error
        except CheckpointError as error:
            raise CheckpointError(f"{path}: the checkpoint does not fit this script: {error} {found[1]}") from error
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{path}: is damaged, or was not written by this helper: {type(error).__name__} {error}. {found[1]}"
            ) from error

    def _take(self, shared: dict[str, Any], path: Path) -> None:
        saved, rank, world_size = shared["ranks"], ranks.rank(), ranks.world_size()
        self.epoch, self.step, self._batches = (shared["position"][name] for name in ("epoch", "step", "batches"))
        self._saved_step = self.step
        if rank < len(saved):
            own = saved[rank]
            parts.load_dicts(self._state, own["dicts"])
        else:
            own = _derive(saved[0], rank)
        for gone in saved[world_size:] if rank == 0 else ():
            parts.add_dicts(self._state, gone["dicts"])
        self._resumed = {**own, "position": {**shared["position"], "world_size": len(saved)}}
        if rank == 0:
            position.print_resume(path, self.epoch, self._batches, len(saved), world_size)


def _derive(saved: dict[str, Any], rank: int) -> dict[str, Any]:
    derived = {}
    for name in ("began", "now"):
        states = saved[name]
        derived[name] = states and {**states, "random": derive_random_states(states["random"], rank)}
    return derived


def _write(directory: SavedSteps, step: int, tensors: dict[str, torch.Tensor]) -> None:
    try:
        storage.write(tensors, directory.begin(step))
        directory.publish(step)
    except OSError as error:
        raise directory.write_error(step, error) from error
