"""The module that published TensorFlow scripts import next to `smdistributed.dataparallel`: only `setBucketSize`.

AWS documents nothing of this module. Its calls on raw pointers (`allReduce`, `wait`, for PyTorch before 1.10) are not
here: `torch.distributed.all_reduce(tensor, async_op=True)` does the same.
"""

from __future__ import annotations

import warnings
from typing import NoReturn

__all__ = ["setBucketSize"]


def setBucketSize(size: int) -> None:  # noqa: N802 — the name in published scripts
    """Checks the size, and warns that it has no effect: these scripts reduce each tensor alone.

    Gradients travel in buckets of `bucket_cap_mb`, an argument of DistributedDataParallel and DistributedOptimizer.

    Args:
        size: Bytes, above 0.

    Raises:
        ValueError: If it is not a whole number above 0.
    """
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ValueError(
            f"smddpcommon.setBucketSize({size!r}): the size must be a whole number of bytes, above 0. Fix: pass one."
        )
    warnings.warn(
        "smddpcommon.setBucketSize has no effect: a tensor that comes alone is reduced alone, and gradients travel in "
        "buckets of bucket_cap_mb, an argument of DistributedDataParallel and DistributedOptimizer.",
        stacklevel=2,
    )


def __getattr__(name: str) -> NoReturn:
    raise AttributeError(
        f"smddpcommon has no {name!r}: of this module of AWS's, there is setBucketSize only. Fix: reduce a tensor "
        "with torch.distributed.all_reduce, or allreduce of smdistributed.dataparallel.tensorflow."
    )
