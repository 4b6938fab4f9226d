"""Replaces modules and functions that torch has only for CUDA.

DataParallel runs the module once, on the first device, with the whole batch. SyncBatchNorm normalizes by the batches of
all ranks, with operations that the CPU has. torch.compile compiles nothing: code for the CPU would prove nothing about
CUDA.
"""

from __future__ import annotations

import functools
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shoal_rehearsal.torch import devices
from shoal_rehearsal.torch.overrides import move


def patch(_: int) -> None:
    """Patches DataParallel and SyncBatchNorm. torch.compile and Module.compile then compile nothing."""
    _patch_data_parallel()
    nn.SyncBatchNorm.forward = _synchronized_forward  # type: ignore[method-assign]
    if hasattr(torch, "compile"):
        torch.compile = _compile_nothing
    if hasattr(nn.Module, "compile"):
        nn.Module.compile = lambda self, *args, **kwargs: _report_uncompiled()  # type: ignore[method-assign]


@functools.cache
def _report_uncompiled() -> None:
    if not int(os.environ.get("RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or 0):
        print("SHOAL REHEARSAL: torch.compile compiles nothing; models run as written.", file=sys.stderr)


def _compile_nothing(model: Any = None, **_: Any) -> Any:
    _report_uncompiled()
    return (lambda decorated: decorated) if model is None else model


def _synchronized_forward(self: nn.SyncBatchNorm, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 (torch's name)
    """SyncBatchNorm's forward over all ranks, with gradients through their statistics. Updates running ones."""
    plain: Any = nn.modules.batchnorm._BatchNorm.forward
    group = self.process_group or (dist.group.WORLD if dist.is_available() and dist.is_initialized() else None)
    if not self.training or group is None or dist.get_world_size(group) == 1:
        return plain(self, input)  # type: ignore[no-any-return]
    axes = [axis for axis in range(input.dim()) if axis != 1]
    shape = [-1 if axis == 1 else 1 for axis in range(input.dim())]
    wide = input.float()
    count = torch.full((1,), input.numel() / input.shape[1], device=input.device)
    summed = _sum_over_ranks(torch.cat([wide.sum(axes), count]), group)
    number, mean = summed[-1], summed[:-1] / summed[-1]
    centred = wide - mean.view(shape)
    variance = _sum_over_ranks(centred.square().sum(axes), group) / number
    if self.track_running_stats:
        _update_running_statistics(self, mean.detach(), (variance * number / (number - 1)).detach())
    scaled = centred * (variance + self.eps).rsqrt().view(shape)
    if self.affine:
        scaled = scaled * self.weight.view(shape) + self.bias.view(shape)
    return scaled.to(input.dtype)


def _update_running_statistics(norm: nn.SyncBatchNorm, mean: torch.Tensor, variance: torch.Tensor) -> None:
    assert norm.running_mean is not None and norm.running_var is not None and norm.num_batches_tracked is not None
    norm.num_batches_tracked.add_(1)
    share = 1.0 / float(norm.num_batches_tracked) if norm.momentum is None else norm.momentum
    norm.running_mean.mul_(1 - share).add_(mean, alpha=share)
    norm.running_var.mul_(1 - share).add_(variance, alpha=share)


def _sum_over_ranks(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    from torch.distributed.nn.functional import all_reduce  # imports much, and few scripts need it

    found: torch.Tensor = all_reduce(tensor, group=group)  # type: ignore[no-untyped-call]
    return found


def _patch_data_parallel() -> None:
    """Patches DataParallel: with devices, it moves the batch to the first and runs the module there, once."""
    wrapper: Any = nn.DataParallel
    forward = wrapper.forward

    @functools.wraps(forward)
    def once(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        if not self.device_ids:
            return forward(self, *inputs, **kwargs)
        placement = devices.resolve(self.device_ids[0])
        return self.module(*_move_all(inputs, placement), **_move_all(kwargs, placement))

    wrapper.forward = once


def _move_all(value: Any, placement: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return move(value, placement)
    if isinstance(value, dict):
        return {key: _move_all(item, placement) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_move_all(item, placement) for item in value)
    return value
