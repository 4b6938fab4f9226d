"""The place in an epoch at which a training goes on, also with another number of ranks."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from shoal_checkpoint.directories import CheckpointError

_NUMPY_WORDS = 624  # of the state of its generator


def check_place(saved: Any) -> None:
    """Raises CheckpointError unless a checkpoint's position has whole numbers, none of them negative."""
    needed, optional = ("epoch", "step", "batches"), ("unit", "samples")
    values = [saved.get(name, "") for name in needed] + [saved.get(name) or 0 for name in optional]
    if not all(type(value) is int and value >= 0 for value in values):
        raise CheckpointError(f"its position is not one of a training: {str(saved)[:200]}.")


def check_numpy_state(state: Any) -> None:
    """Raises CheckpointError for a state with which NumPy would read beyond its memory. NumPy does not look."""
    if not 0 <= int(state[2]) <= _NUMPY_WORDS:
        raise CheckpointError(f"its state of NumPy's random numbers is at place {state[2]} of {_NUMPY_WORDS}.")


def batches_to_skip(saved: Mapping[str, Any], unit: int | None, world_size: int, length: int | None) -> int:
    """Returns how many batches of an epoch a rank skips, so that each sample is trained once.

    A DistributedSampler gives the ranks the samples of one order in turn. So after a number of batches, all ranks
    together have trained the beginning of that order. Its length counts, with any number of ranks.

    `unit` is the number of samples in a batch of all ranks now, or None. Raises CheckpointError if no batch begins
    there now.
    """
    batches: int = saved["batches"]
    if saved["samples"]:
        raise CheckpointError(
            f"the checkpoint is in epoch {saved['epoch']}, which began with global_batch: its order of samples is "
            "another one. Fix: end that epoch with global_batch"
        )
    if unit == saved["unit"] and (unit is not None or world_size == saved["world_size"]):
        return batches
    place = f"the checkpoint is after {batches} batches of epoch {saved['epoch']} on {saved['world_size']} ranks"
    if unit is None or saved["unit"] is None:
        raise CheckpointError(
            f"{place}. Their number of samples is unknown, because the batch_size is not given, so {world_size} ranks "
            f"cannot go on there. Fix: start {saved['world_size']} ranks, or give the batch_size"
        )
    samples: int = batches * saved["unit"]
    if samples % unit and (length is None or samples < length):
        raise CheckpointError(
            f"{place}, which are {samples} samples. Now a batch of all ranks has {unit} samples, {unit // world_size} "
            f"on each of {world_size} ranks, and no batch begins there. Fix: use a batch_size with which "
            f"{world_size} × batch_size divides {samples}, such as {_fitting(samples, unit // world_size, world_size)}"
        )
    return math.ceil(samples / unit)


def _fitting(samples: int, batch_size: int, world_size: int) -> int | str:
    fitting = (size for size in range(batch_size, 0, -1) if samples % (size * world_size) == 0)
    return next(fitting, "none: start a number of ranks that divides it")


class Part(NamedTuple):
    """A batch of a rank: places in the order of an epoch's samples, and their part in a step."""

    begin: int
    end: int
    weight: float
    ends_step: bool
    trained: int  # samples of the epoch that all ranks have trained when this step has ended


@dataclass(frozen=True)
class Split:
    """A rank's batches of an epoch. The steps are the same with any number of ranks.

    All ranks have equal numbers of batches in a step. A batch that would be empty has a sample of another one, with
    weight 0.

    Args:
        first: The number of samples of the epoch that are trained already.
        count: The number of samples of the epoch.
        global_batch: The number of samples in a step of all ranks. The last step of an epoch can have fewer.
        most: The greatest number of samples in a batch of a rank. None: it takes its share of a step at once.
    """

    first: int
    count: int
    global_batch: int
    rank: int
    world_size: int
    most: int | None = None

    def __iter__(self) -> Iterator[Part]:
        """Yields the batches with weights for their mean losses.

        The mean over ranks of the sums of weighted gradients is the mean gradient of the step's samples.
        """
        for begin in range(self.first, self.count, self.global_batch):
            samples = min(self.global_batch, self.count - begin)
            batches = math.ceil(math.ceil(samples / self.world_size) / self.most) if self.most else 1
            share, at = _share(samples, self.world_size, self.rank)
            for number in range(batches):
                size, offset = _share(share, batches, number)
                place = begin + at + offset if size else begin
                weight = size * self.world_size / samples
                yield Part(place, place + max(size, 1), weight, number == batches - 1, begin + samples)


def _share(count: int, parts: int, number: int) -> tuple[int, int]:
    """Returns the size of a part of `count` things, and how many are before it. Sizes differ by one at most."""
    size, more = divmod(count, parts)
    return size + (number < more), number * size + min(number, more)


def samples_to_skip(saved: Mapping[str, Any]) -> int:
    """Returns how many samples all ranks have trained. Raises CheckpointError if they had another order."""
    if saved["batches"] and saved["samples"] is None:
        raise CheckpointError(
            f"the checkpoint is in epoch {saved['epoch']}, which began without global_batch: its order of samples is "
            "another one. Fix: end that epoch without global_batch"
        )
    return saved["samples"] or 0


def warn_if_nothing_is_left(epoch: int, count: int) -> None:
    if 0 < count <= epoch:
        print(
            f"shoal: warning: the checkpoint is after epoch {epoch} of {count}, so nothing is left to train. To train "
            "more, ask for more epochs, or use another directory for a new training",
            file=sys.stderr,
            flush=True,
        )


def print_resume(path: object, epoch: int, batches: int, saved: int, size: int) -> None:
    """Prints where the training goes on, for rank 0. `saved` ranks wrote the checkpoint, `size` ranks load it."""
    ends = "" if saved == size else f"; saved by {saved} ranks, loaded by {size}"
    print(
        f"shoal: going on from {path}: epoch {epoch}, {batches} batches of it done{ends}", file=sys.stderr, flush=True
    )


def check_every(every: int | None) -> None:
    if every is not None and every < 1:
        raise ValueError(
            f"every={every}: the number of steps between saves. Allowed: 1 or more, or None. Fix: pass one of these"
        )


def check_global_batch(global_batch: int) -> None:
    if global_batch < 1:
        raise ValueError(
            f"global_batch={global_batch}: the number of samples in a step of all ranks. Allowed: 1 or more. Fix: "
            "pass one of these"
        )
