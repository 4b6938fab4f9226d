"""The C allocator of this process: from which size on it returns memory to the system as soon as it is freed.

glibc gives each large block a mapping of its own, which it returns at once. Its limit begins at 128 KiB, and grows to
the size of a mapped block that is freed, up to 32 MiB. From then on, smaller tensors come from a heap, and leave holes
there. A rank that holds a part of a model makes and frees whole layers between tensors that stay. So its heap becomes
much larger than its tensors: `sharded-memory-4` in benchmarks/modelparallel.py shows it.
"""

from __future__ import annotations

import ctypes
import os

MAPPED_BYTES, KEPT_BYTES = 8 << 20, 64 << 20
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # <malloc.h>
_TUNED_BY = (
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TRIM_THRESHOLD_",
    "glibc.malloc.mmap_threshold",
    "glibc.malloc.trim_threshold",
)


def map_large_blocks() -> bool:
    """Makes glibc map each block of at least `MAPPED_BYTES`, and keep up to `KEPT_BYTES` at the end of its heap.

    It does so for the rest of the process, and for every library in it. Returns False, and changes nothing, if the
    environment tunes either, or the C library is another.
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or any(name in os.environ or name in tunables for name in _TUNED_BY):
        return False
    return all((mallopt(_M_MMAP_THRESHOLD, MAPPED_BYTES), mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)))
