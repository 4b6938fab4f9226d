"""Importing this module registers the backend `smddp` with torch.distributed (AWS developer guide, 1.4 and later).

    import smdistributed.dataparallel.torch.torch_smddp
    torch.distributed.init_process_group(backend="smddp")

Then torch.distributed has all its collectives, of tensors on the CPU and on CUDA devices, of any shape and strides:
sums and averages of real and complex dtypes (float16 and bfloat16 are added up in float32), minima, maxima, products,
and what integers have. All ranks get bitwise the same result. `ReduceOp.AVG`, `new_group` and other backends beside
this one work, which AWS's lacks. torch's own DistributedDataParallel, FullyShardedDataParallel and
ZeroRedundancyOptimizer run on it.

Where mpirun alone has started this process, importing also sets RANK, WORLD_SIZE and the rest of what torch's `env://`
reads. Raises LaunchError where the launch environment contradicts itself; the collectives raise SMDDPError when a rank
is gone, does not come in time or calls another one, and where a dtype has no such reduction.
"""

from __future__ import annotations

import os

from smdistributed.core.launch import fill_in
from smdistributed.core.torch.backend import BACKEND, register
from smdistributed.core.torch.process_group import ProcessGroup
from smdistributed.dataparallel.torch import consistency

__all__ = ["BACKEND"]

register()
consistency.install(lambda group: isinstance(group, ProcessGroup))
fill_in(os.environ)
