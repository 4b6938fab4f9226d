"""The C allocator of this process: from which size on it returns memory to the system as soon as it is freed.

glibc gives each large block a mapping of its own, which it returns at once. Its limit begins at 128 KiB, and grows to
the size of a mapped block that is freed, up to 32 MiB. From then on, smaller tensors come from a heap, and leave holes
there. A rank that holds a part of a model makes and frees whole layers between tensors that stay. So its heap becomes
much larger than its tensors: `sharded-memory-4` in benchmarks/modelparallel.py shows it.
"""

from __future__ import annotations

import ctypes
import os

STAGE_BYTES, SHARD_BYTES = 8 << 20, 2 << 20
"""Sizes of mapped blocks, of jobs with several stages or with shards. Activations are best kept: most are smaller."""
_KEPT_BYTES = 64 << 20
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # <malloc.h>
_TUNED_BY = (
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TRIM_THRESHOLD_",
    "glibc.malloc.mmap_threshold",
    "glibc.malloc.trim_threshold",
)


def map_large_blocks(size: int) -> bool:
    """Makes glibc map each block of at least `size` bytes, and keep up to 64 MiB at the end of its heap.

    It does so for the rest of the process, and for every library in it. Returns False, and changes nothing, if the
    environment tunes either, or the C library is another.
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or any(name in os.environ or name in tunables for name in _TUNED_BY):
        return False
    return all((mallopt(_M_MMAP_THRESHOLD, size), mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)))
