"""What stands in for CUDA in PyTorch, all of it on the CPU.

Physically every tensor is a CPU tensor. `mode` translates the devices that torch's functions are given, and `places`
remembers on which pretended device each tensor is; the other modules stand in for one part of torch.cuda each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shoal_rehearsal import notice
from shoal_rehearsal.torch import (
    amp,
    checkpoints,
    cuda,
    distributed,
    edges,
    mode,
    modules,
    printing,
    streams,
)

if TYPE_CHECKING:
    from shoal_rehearsal.settings import Settings


def rehearse(settings: Settings) -> None:
    """Stand in for CUDA from here on, in this process and the threads it starts."""
    notice.prepare(settings, real=torch.cuda.device_count())  # it is about to be replaced
    for part in (cuda, streams, amp, checkpoints, modules, distributed, printing, edges, mode):
        part.stand_in(settings.gpus)
