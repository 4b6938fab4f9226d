"""Where a training is in its data: begins a DataLoader's epoch after a number of batches, at the cost of indices only.

The batches that the training has consumed count, not those that workers have loaded ahead. Workers draw random numbers
from a seed for each batch. So their transforms do not depend on which worker loads a batch, or on a restart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, get_worker_info

from shoal_checkpoint.position import Split, check_global_batch
from shoal_checkpoint.torch import ranks
from shoal_checkpoint.torch.random_states import read_random_states, seed_all, set_random_states


class SeededIndices(list):  # type: ignore[type-arg]
    """The indices of a batch. Seeds a worker's generators when it begins to load them, or `each` with its own seed."""

    def __init__(self, indices: Any, seed: int, each: bool) -> None:
        super().__init__(indices)
        self.seed, self.each = seed, each

    def __iter__(self) -> Iterator[Any]:
        for number, index in enumerate(super().__iter__()):
            if get_worker_info() is not None and (self.each or not number):
                seed_all((self.seed + number) % 2**63)
            yield index


class _Share(list):  # type: ignore[type-arg]
    place = 0


class Shares:
    def __init__(self, sampler: Any, split: Split) -> None:
        self._sampler, self._split = sampler, split

    def __iter__(self) -> Iterator[_Share]:
        order = list(self._sampler)
        for part in self._split:
            share = _Share(order[part.begin : part.end])
            share.place = part.begin
            yield share


class _Indices:
    """Iterates over the indices of an epoch's batches, with random states of their own: by `seed_generators`.

    So the order does not change if the loader asks earlier for the next batch, or if other code draws.
    """

    def __init__(self, inner: Any, skip: int, seed: int | None, seed_generators: Callable[[], None]) -> None:
        self._inner, self._number, self._seed = inner, skip, seed
        self._seed_generators: Callable[[], None] | None = seed_generators
        self._indices: Iterator[Any] = iter(())
        self._states: dict[str, Any] = {}

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        before = read_random_states()
        try:
            self._enter()
            indices = next(self._indices)
        finally:
            self._states = read_random_states()
            set_random_states(before)
        number, self._number = self._number, self._number + 1
        if self._seed is None or not isinstance(indices, (list, tuple)):
            return indices
        if isinstance(indices, _Share):
            return SeededIndices(indices, self._seed + indices.place, each=True)
        return SeededIndices(indices, self._seed + number, each=False)

    def _enter(self) -> None:
        """Sets the random states of the sampler. The first time, draws the indices that are skipped."""
        if self._seed_generators is None:
            set_random_states(self._states)
            return
        self._seed_generators()
        self._seed_generators = None
        self._indices = iter(self._inner)
        for _ in islice(self._indices, self._number):
            pass


class BatchIndices:
    """Stands for a DataLoader's batch sampler, or its sampler if it does not batch, while an iterator is made.

    The next iterators begin with `start`. A loader with persistent workers asks for one in each epoch.
    """

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.start: tuple[Any, int, int | None, Callable[[], None]] = (inner, 0, None, lambda: None)

    def __len__(self) -> int:
        return len(self.inner)

    def __iter__(self) -> Iterator[Any]:
        return _Indices(*self.start)


class ExactLoader:
    """Iterates over a DataLoader from any batch on, as if those before were loaded. Raises TypeError for others."""

    def __init__(self, loader: Any) -> None:
        if getattr(type(loader), "__iter__", None) is not DataLoader.__iter__:
            raise TypeError(
                f"{type(loader).__name__} is not torch's DataLoader, or iterates in another way. Its place in an epoch "
                "cannot be saved. Fix: give batches() a torch.utils.data.DataLoader, for accelerate without prepare()"
            )
        self.loader = loader
        self._attribute = "sampler" if loader.batch_sampler is None else "batch_sampler"
        self._indices = BatchIndices(getattr(loader, self._attribute))
        self.is_iterable = isinstance(loader.dataset, torch.utils.data.IterableDataset)

    def set_epoch(self, epoch: int) -> None:
        for sampler in self._samplers():
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)

    @property
    def length(self) -> int | None:
        return len(self.loader.dataset) if hasattr(self.loader.dataset, "__len__") else None

    def samples_per_batch(self, world_size: int) -> int | None:
        """Returns the number of samples in a batch of all ranks. None if the loader has batches of its own making.

        With tensor parallelism, several ranks have the same batch: a DistributedSampler knows how many differ.
        """
        replicas = getattr(self.loader.sampler, "num_replicas", world_size)
        return None if self.loader.batch_size is None else self.loader.batch_size * int(replicas)

    def split(self, first: int, global_batch: int) -> Split:
        """Returns this rank's shares of global batches. Raises TypeError if samples cannot be shared."""
        check_global_batch(global_batch)
        sampler, size = self.loader.sampler, self.loader.batch_size
        if self.is_iterable or size is None or hasattr(sampler, "num_replicas"):
            raise TypeError(
                f"global_batch={global_batch}: this loader's samples cannot be shared by the ranks. Fix: give the "
                "DataLoader a dataset with indices, a batch_size, and shuffle or a sampler of all samples, not a "
                "DistributedSampler or a batch_sampler"
            )
        count = len(sampler)
        if self.loader.drop_last:
            count -= count % global_batch
        return Split(first, count, global_batch, ranks.rank(), ranks.world_size(), size)

    def read_generators(self) -> list[torch.Tensor]:
        return [each.get_state() for each in self._generators()]

    def set_generators(self, states: list[torch.Tensor]) -> None:
        for generator, state in zip(self._generators(), states):
            generator.set_state(state)

    def _generators(self) -> list[torch.Generator]:
        found = [getattr(owner, "generator", None) for owner in (self.loader, *self._samplers())]
        return list({id(each): each for each in found if each is not None}.values())

    def _samplers(self) -> list[Any]:
        batch_sampler = self.loader.batch_sampler
        found = self.loader.sampler, batch_sampler, getattr(batch_sampler, "sampler", None)
        return [each for each in found if each is not None]

    def start(self, skip: int, split: Split | None = None) -> Iterator[Any]:
        """Returns an iterator over an epoch's batches without the first `skip`, or over the batches of a split.

        Draws one seed from torch's generator and each of the loader's, however many the loader draws. Skipped samples
        are not loaded, unless the dataset is an IterableDataset. With a split, it is a collective call: all ranks get
        the seeds of rank 0.
        """
        drawn = [_draw(each) for each in (None, *self._generators())]
        seed, *own = drawn if split is None else ranks.from_first_rank(lambda: drawn)
        inner = self._indices.inner if split is None else Shares(self.loader.sampler, split)
        before = read_random_states()
        try:
            return self._iterate(inner, skip, seed, list(zip(self._generators(), own)))
        finally:
            set_random_states(before)

    def _iterate(self, inner: Any, skip: int, seed: int, seeds: list[tuple[torch.Generator, int]]) -> Iterator[Any]:
        if self.is_iterable:
            batches: Iterator[Any] = iter(self.loader)
            for _ in islice(batches, skip):
                pass
            return batches

        def seed_generators() -> None:
            seed_all(seed)
            for generator, own in seeds:
                generator.manual_seed(own)

        self._indices.start = inner, skip, seed if self.loader.num_workers else None, seed_generators
        attributes = vars(self.loader)  # a DataLoader refuses to set them in the ordinary way
        attributes[self._attribute] = self._indices
        try:
            batches = iter(self.loader)
        finally:
            attributes[self._attribute] = self._indices.inner
        return batches


def _draw(generator: torch.Generator | None) -> int:
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())
