"""Importing this module registers the backend `smddp` with torch.distributed (AWS developer guide, 1.4 and later).

    import smdistributed.dataparallel.torch.torch_smddp
    torch.distributed.init_process_group(backend="smddp")

Then torch.distributed has all its collectives, of tensors on the CPU and on CUDA devices, of any shape and strides:
sums and averages of real and complex dtypes (float16 and bfloat16 are added up in float32), minima, maxima, products,
and what integers have; of sparse tensors, sums and averages. All ranks get bitwise the same result. `ReduceOp.AVG`,
`new_group` and other backends beside this one work, which AWS's lacks: `init_process_group("cpu:gloo,cuda:smddp")` too.
torch's own DistributedDataParallel, FullyShardedDataParallel and ZeroRedundancyOptimizer run on it, and torch.compile.
CUDA tensors go to torch's NCCL where each rank has a device of its own, else through the host: not yet run on a GPU.

Where mpirun alone has started this process, importing also sets RANK, WORLD_SIZE and the rest of what torch's `env://`
reads. Raises LaunchError where the launch environment contradicts itself; the collectives raise SMDDPError when a rank
is gone, does not come in time or calls another one, and where a dtype has no such reduction. Variables that AWS's
library reads and this one does not are warned of, on rank 0.
"""

from __future__ import annotations

import os

from smdistributed.core.launch import fill_in
from smdistributed.core.torch.backend import BACKEND, register
from smdistributed.core.torch.per_device import engine_of
from smdistributed.dataparallel.torch import consistency
from smdistributed.dataparallel.unused_settings import warn_of_unused_settings

__all__ = ["BACKEND"]

register()
consistency.install(engine_of)
fill_in(os.environ)
if os.environ.get("RANK", "0") == "0":
    warn_of_unused_settings(os.environ)
