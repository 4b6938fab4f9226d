"""Gradients with sharded data parallelism and tensor parallelism: FSDP2 averages over RDP_GROUP, this over TP_GROUP.

Ranks of TP_GROUP hold the same part of each parameter that is not split over them, so that they can add up their parts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from smdistributed.core.torch.devices import device_of
from smdistributed.modelparallel.torch.nn.module import split_of
from smdistributed.modelparallel.torch.nn.tensor_group import TensorGroup
from smdistributed.modelparallel.torch.script.buckets import split_into_buckets
from smdistributed.modelparallel.torch.script.gradients import local_part


class ShardAverages:
    """Averages the gradients of a step over TP_GROUP, all at its end. `parameters`: of the placed model, in parts."""

    def __init__(self, parameters: Sequence[nn.Parameter], group: TensorGroup, bucket_bytes: int) -> None:
        self.saw_gradients = False
        self._parameters, self._group, self._bucket_bytes = parameters, group, bucket_bytes
        self._hooked: set[nn.Parameter] = set()
        self._is_multiplied = False
        self.begin()

    def begin(self) -> None:
        """Begins a step. FSDP2 calls the hooks when it has added to a gradient."""
        self.saw_gradients = False
        for parameter in self._parameters:
            if parameter.requires_grad and parameter not in self._hooked:  # scripts may unfreeze layers
                self._hooked.add(parameter)
                parameter.register_post_accumulate_grad_hook(self._note_gradient)  # type: ignore[no-untyped-call]

    def before_backward(self) -> None:
        """Multiplies what `end` will divide, although it is an average already. The script may reset it meanwhile."""
        if not self._is_multiplied and not self._group.same_rows:
            self._multiply_shares(self._group.size)
            self._is_multiplied = True

    def end(self) -> None:
        """Averages gradients of whole parameters. A share's gradient is divided: it has the batches of all TP_GROUP.

        With `prescaled_batch` its ranks have the same batches, and shares' gradients stay.
        """
        self._average(self._trained_on_any_rank())
        if not self._group.same_rows:
            self._multiply_shares(1 / self._group.size)
            self._is_multiplied = False

    def finish(self) -> None:
        """Does nothing: FSDP2 averages after each step, also with `backward_passes_per_step` above 1."""

    def _note_gradient(self, _: torch.Tensor) -> None:
        self.saw_gradients = True

    def _multiply_shares(self, factor: float) -> None:
        for parameter in self._parameters:
            if parameter.grad is not None and split_of(parameter) is not None:
                local_part(parameter.grad).mul_(factor)

    def _trained_on_any_rank(self) -> list[nn.Parameter]:
        """Returns parameters that are not split over TP_GROUP, and have a gradient on a rank of it. A collective."""
        whole = [p for p in self._parameters if split_of(p) is None]
        flags = torch.tensor([float(p.grad is not None) for p in whole], device=device_of(self._group.group))
        dist.all_reduce(flags, group=self._group.group)
        return [parameter for parameter, flag in zip(whole, flags.tolist()) if flag]

    @torch.no_grad()
    def _average(self, parameters: Sequence[nn.Parameter]) -> None:
        for bucket in split_into_buckets(parameters, self._bucket_bytes):
            for parameter in bucket:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            parts = [local_part(p.grad) for p in bucket if p.grad is not None]
            flat = torch.cat([part.reshape(-1) for part in parts]).div_(self._group.size)
            dist.all_reduce(flat, group=self._group.group)
            for part, average in zip(parts, flat.split([part.numel() for part in parts])):  # type: ignore[no-untyped-call]
                part.copy_(average.view_as(part))
