"""One rank: run every collective on this rank's tensors; what went in and came out goes to OUT/<rank>-<name>.npy."""

from __future__ import annotations

import sys

import numpy as np
import torch

import smdistributed.dataparallel.torch.distributed as dist

ELEMENTS = 1001

dist.init_process_group(backend="smddp")
dist.init_process_group()  # again, as several modules of a script do
assert dist.is_initialized() and dist.is_available() and torch.distributed.is_initialized()

rank = dist.get_rank()
given = torch.from_numpy(np.random.RandomState(rank).standard_normal((7, ELEMENTS)))
results: dict[str, torch.Tensor] = {"given": given}

for op in dist.ReduceOp:
    for dtype in (torch.float32, torch.float64):
        results[f"{op.name}-{dtype}"] = given.to(dtype, copy=True)
        assert dist.all_reduce(results[f"{op.name}-{dtype}"], op=op) is None
    results[f"{op.name}-async"] = given.clone()
    work = dist.all_reduce(results[f"{op.name}-async"], op=op, async_op=True)
    assert work is not None
    work.wait()
    assert work.is_completed()

results["SUM-integer"] = torch.full((3,), rank + 1)
dist.all_reduce(results["SUM-integer"])
results["broadcast"] = given.clone()
dist.broadcast(results["broadcast"], src=1)
results["reduce"] = given.clone()
dist.reduce(results["reduce"], dst=1)
results["reduce-to-0"] = given.clone()
dist.reduce(results["reduce-to-0"])
dist.barrier()

results["place"] = torch.tensor([rank, dist.get_local_rank(), dist.get_world_size()])
for name, tensor in results.items():
    np.save(f"{sys.argv[1]}/{rank}-{name}.npy", tensor.numpy())
