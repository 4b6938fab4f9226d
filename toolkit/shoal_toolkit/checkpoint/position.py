"""The place in an epoch at which a training goes on, also with another number of ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from shoal_toolkit.checkpoint.directories import CheckpointError


def batches_to_skip(saved: Mapping[str, Any], unit: int | None, world_size: int, length: int | None) -> int:
    """Return how many batches of an epoch a rank skips, so that each sample is trained once.

    A DistributedSampler gives the ranks the samples of one order in turn. So after a number of batches, all ranks
    together have trained the beginning of that order. Its length counts, with any number of ranks.

    Args:
        saved: The checkpoint's `batches`, `unit`, `world_size` and `epoch`.
        unit: The number of samples in a batch of all ranks now; None if it is unknown.
        world_size: The number of ranks now.
        length: The number of samples in the dataset; None if it is unknown.

    Raises:
        CheckpointError: If no batch begins there now.
    """
    batches: int = saved["batches"]
    if unit == saved["unit"] and (unit is not None or world_size == saved["world_size"]):
        return batches
    place = f"the checkpoint is after {batches} batches of epoch {saved['epoch']} on {saved['world_size']} ranks"
    if unit is None or saved["unit"] is None:
        raise CheckpointError(
            f"{place}. Their number of samples is unknown, because the batch_size is not given, so {world_size} ranks "
            f"cannot go on there. Fix: start {saved['world_size']} ranks, or give the batch_size"
        )
    samples = batches * saved["unit"]
    if samples % unit and (length is None or samples < length):
        raise CheckpointError(
            f"{place}, which are {samples} samples. Now a batch of all ranks has {unit} samples, {unit // world_size} "
            f"on each of {world_size} ranks, and no batch begins there. Fix: use a batch_size with which "
            f"{world_size} × batch_size divides {samples}, such as {_fitting(samples, unit // world_size, world_size)}"
        )
    return math.ceil(samples / int(unit))


def _fitting(samples: int, batch_size: int, world_size: int) -> int | str:
    """Return the greatest batch size up to this one that fits, if there is any."""
    fitting = (size for size in range(batch_size, 0, -1) if samples % (size * world_size) == 0)
    return next(fitting, "none: start a number of ranks that divides it")


def share_batch(global_batch: int, world_size: int, most: int) -> tuple[int, int]:
    """Return a rank's batch size and the number of batches that it accumulates, for a constant global batch.

    Args:
        global_batch: The number of samples in a step of all ranks.
        world_size: The number of ranks.
        most: The greatest batch size of a rank, which its memory allows.

    Returns:
        Two numbers with batch size × accumulated batches × world_size = global_batch, and the greatest such batch size.

    Raises:
        ValueError: If the ranks cannot have equal shares.
    """
    if global_batch % world_size:
        near = [size for size in range(1, global_batch + 1) if global_batch % size == 0 and size <= 2 * world_size]
        raise ValueError(
            f"a global batch of {global_batch} samples cannot be shared equally by {world_size} ranks. "
            f"Fix: use a multiple of {world_size}, or one of these numbers of ranks: {', '.join(map(str, near))}"
        )
    share = global_batch // world_size
    batch_size = next(size for size in range(min(share, most), 0, -1) if share % size == 0)
    return batch_size, share // batch_size
