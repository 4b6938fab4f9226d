"""Emulates CUDA in PyTorch.

Every tensor is a CPU tensor. `function_mode` replaces the devices in calls of torch's functions, and `devices`
remembers the emulated device of each tensor. The other modules each replace one part of torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shoal_rehearsal.settings import prepare_notice
from shoal_rehearsal.torch import (
    amp,
    cuda,
    cuda_kernels,
    distributed,
    distributed_tensor,
    function_mode,
    module_behavior,
    printing,
    streams,
    tensor_sources,
    triton,
)

if TYPE_CHECKING:
    from shoal_rehearsal.settings import RehearsalSettings


def emulate_gpus(settings: RehearsalSettings) -> None:
    """Patches torch, in this process and in threads that start later. It cannot be undone. It prepares the notice."""
    prepare_notice(settings, real=torch.cuda.device_count())  # before it is replaced
    parts = triton, cuda, cuda_kernels, streams, amp, module_behavior
    distribution = distributed, distributed_tensor
    for part in (*parts, *distribution, printing, tensor_sources, function_mode):
        part.patch(settings.gpus)
