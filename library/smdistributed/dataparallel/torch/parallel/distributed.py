"""The first generation's model wrapper, on torch's own DistributedDataParallel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.nn.parallel

from smdistributed.core.options import names_of, refuse_unknown
from smdistributed.dataparallel.torch.distributed import require_init

if TYPE_CHECKING:
    from collections.abc import Sequence

BUCKET_CAP_MB = 25


class DistributedDataParallel(torch.nn.parallel.DistributedDataParallel):
    """Train `module` data parallel: backward averages the gradients over the ranks (AWS developer guide, 1.x).

    At construction the parameters and buffers of rank 0 are copied to all. `.module` is the wrapped module; inside
    `.no_sync()` gradients add up on each rank and travel with the first backward after it.

    device_ids, output_device: one CUDA device, for a module on that device; None for a module on the CPU.
    broadcast_buffers: copy rank 0's buffers to all before each forward in training mode.
    process_group: of torch.distributed, or `group.WORLD`.
    bucket_cap_mb: gradients travel in buckets of this size, in MiB; None for 25.
    gradient_accumulation_steps: taken (published scripts give it) and not needed: what has been averaged stays the same
        when it is averaged again with the next gradients. `.no_sync()` saves the traffic.
    torch_options: the further options of torch's own class (`find_unused_parameters`, …).

    A module on the CPU goes to this rank's CUDA device, where there is one: published scripts wrap first, then move it.

    A forward in evaluation mode under `torch.no_grad()` starts no collective: rank 0 may evaluate alone (published
    scripts).

    Raises SMDDPError before `init_process_group`, TypeError for an unknown option, and what torch's own class raises.
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
        _onto_device(module)
        known = [*names_of(DistributedDataParallel), *names_of(torch.nn.parallel.DistributedDataParallel)]
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
        """Buffers do not change in evaluation mode, so there is nothing to copy."""
        return self.training and bool(super().will_sync_module_buffers())  # type: ignore[no-untyped-call]


def _onto_device(module: torch.nn.Module) -> None:
    on_cpu = all(parameter.device.type == "cpu" for parameter in module.parameters())
    if on_cpu and torch.cuda.is_available():
        module.cuda(torch.cuda.current_device())
