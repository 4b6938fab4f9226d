"""The first generation's model wrapper, on torch's own DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.nn.parallel

from smdistributed.core.options import keyword_names, refuse_unknown
from smdistributed.dataparallel.torch.distributed import require_init

BUCKET_CAP_MB = 25


class DistributedDataParallel(torch.nn.parallel.DistributedDataParallel):
    """Trains a module data parallel: backward averages the gradients over the ranks (AWS developer guide, 1.x).

    The constructor copies rank 0's parameters and buffers to all ranks. `.module` is the wrapped module. Inside
    `.no_sync()` gradients accumulate on each rank; the first backward after it reduces them.

    A module on the CPU is moved to this rank's CUDA device if there is one: published scripts wrap first and move then.
    A forward in evaluation mode under `torch.no_grad()` starts no collective, so rank 0 may evaluate alone (published
    scripts).

    Args:
        module: The model; it is moved to this rank's CUDA device if there is one.
        device_ids: One CUDA device, for a module on that device; None for a module on the CPU.
        output_device: The same device, or None.
        broadcast_buffers: Whether to copy rank 0's buffers to all ranks before each forward in training mode.
        process_group: Of torch.distributed, or `group.WORLD`.
        bucket_cap_mb: Size of the gradients' buckets in MiB; None: 25.
        gradient_accumulation_steps: Accepted for published scripts, and not needed: averaged gradients stay the same
            when they are averaged again with the next ones. `.no_sync()` saves the traffic.
        torch_options: Further options of torch's own class (`find_unused_parameters`, …).

    Raises:
        SMDDPError: Before `init_process_group`, or if the ranks' models differ.
        TypeError: For an unknown option.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        broadcast_buffers: bool = True,
        process_group: torch.distributed.ProcessGroup | None = None,
        bucket_cap_mb: int | None = None,
        gradient_accumulation_steps: int = 1,
        **torch_options: Any,
    ) -> None:
        require_init()
        _move_to_device(module)
        known = [*keyword_names(DistributedDataParallel), *keyword_names(torch.nn.parallel.DistributedDataParallel)]
        refuse_unknown("DistributedDataParallel", torch_options, dict.fromkeys(known))
        if not broadcast_buffers:  # torch's default is True; naming the option warns since 2.13
            torch_options["broadcast_buffers"] = False
        super().__init__(
            module,
            device_ids=device_ids,
            output_device=output_device,
            process_group=process_group,
            bucket_cap_mb=BUCKET_CAP_MB if bucket_cap_mb is None else bucket_cap_mb,
            **torch_options,
        )

    def will_sync_module_buffers(self) -> bool:
        """Whether torch copies buffers now: not in evaluation mode, in which they do not change."""
        return self.training and bool(super().will_sync_module_buffers())  # type: ignore[no-untyped-call]


def _move_to_device(module: torch.nn.Module) -> None:
    """Moves a module to the current CUDA device, in place, if there is one and all its parameters are on the CPU."""
    on_cpu = all(parameter.device.type == "cpu" for parameter in module.parameters())
    if on_cpu and torch.cuda.is_available():
        module.cuda(torch.cuda.current_device())
