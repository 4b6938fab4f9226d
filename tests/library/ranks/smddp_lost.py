"""A rank that reduces for ever, until another one is lost: it says what it is told then."""

from __future__ import annotations

import torch
import torch.distributed as dist

import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401 (registers the backend)

dist.init_process_group(backend="smddp")
tensors = [torch.zeros(size) for size in (10, 100_000, 3_000_000)]
dist.all_reduce(tensors[0])
print("up", flush=True)
try:
    while True:
        for tensor in tensors:
            dist.all_reduce(tensor)
except Exception as error:
    print(error, flush=True)
