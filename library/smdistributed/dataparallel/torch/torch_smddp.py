"""Import this module to register the backend `smddp` with torch.distributed (AWS developer guide, 1.4 and later).

    import smdistributed.dataparallel.torch.torch_smddp
    torch.distributed.init_process_group(backend="smddp")

With torch 2.5 and later the name alone is enough, if the variables of `env://` are set (core/torch/by_name.py).

All collectives of torch.distributed then work, for CPU and CUDA tensors of any shape and strides. All ranks get bitwise
the same result. Real, complex and sparse tensors have sums and averages; float16 and bfloat16 are summed in float32.
Real dtypes also have minima, maxima and products. Integers also have bitwise reductions.

torch's DistributedDataParallel, FullyShardedDataParallel, ZeroRedundancyOptimizer and torch.compile work. Unlike in
AWS's library, so do `ReduceOp.AVG`, `new_group` and several backends: `init_process_group("cpu:gloo,cuda:smddp")`. CUDA
tensors go through torch's NCCL if each rank has a device of its own, otherwise through the host. One GPU has
run this. NCCL between GPUs has not run yet.

If only mpirun started this process, the import also sets the variables that torch's `env://` reads (RANK, WORLD_SIZE,
…). On rank 0 it warns of variables that AWS's library reads and this one ignores. It patches
DistributedDataParallel.__init__, which then compares the ranks' models.

The import raises LaunchError if the launch environment contradicts itself. Collectives raise SMDDPError if a rank has
ended, is late or calls another collective, and if a dtype does not support the reduction.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping

from smdistributed.core import timeline
from smdistributed.core.launch import set_torch_environment
from smdistributed.core.torch.backend import BACKEND, register
from smdistributed.core.torch.per_device import engine_of
from smdistributed.dataparallel import _start_requested_profiler
from smdistributed.dataparallel.torch import consistency, training_steps

__all__ = ["BACKEND"]

# Not SMDATAPARALLEL_USE_SINGLENODE and SMDATAPARALLEL_USE_HOMOGENEOUS: launchers set them.
_UNUSED_NAMES = ("SMDATAPARALLEL_OPTIMIZE_SDP",)
_UNUSED_PREFIXES = ("SMDDP_AG_",)


def _warn_of_unused_settings(environ: Mapping[str, str]) -> None:
    unused = sorted(name for name in environ if name in _UNUSED_NAMES or name.startswith(_UNUSED_PREFIXES))
    if unused:
        warnings.warn(
            f"{', '.join(unused)} in the environment: no effect. They tune AWS's collectives; this library has "
            "SMDDP_ENGINE instead.",
            stacklevel=3,
        )


register(on_first_group=_start_requested_profiler)
timeline.observe(training_steps.record_steps)
consistency.install_model_check(engine_of)
set_torch_environment(os.environ)
if os.environ.get("RANK", "0") == "0":
    _warn_of_unused_settings(os.environ)
