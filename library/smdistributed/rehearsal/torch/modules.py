"""What torch does with a module on CUDA alone.

DataParallel does not split its batch: the module runs once, on the first device. SyncBatchNorm normalises by each
rank's own batch. And torch.compile compiles nothing: what it made for the CPU would tell nothing about CUDA.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from smdistributed.rehearsal.torch import devices
from smdistributed.rehearsal.torch.answers import move


def stand_in(_: int) -> None:
    """Replace their forward, and torch.compile."""
    _data_parallel()
    torch.nn.SyncBatchNorm.forward = torch.nn.modules.batchnorm._BatchNorm.forward  # type: ignore[method-assign]

    if hasattr(torch, "compile"):
        torch.compile = _not_compiled
    if hasattr(torch.nn.Module, "compile"):
        torch.nn.Module.compile = lambda self, *args, **kwargs: None  # type: ignore[method-assign]


def _not_compiled(model: Any = None, **_: Any) -> Any:
    """Return the model or function; without one, a decorator that does."""
    return (lambda decorated: decorated) if model is None else model


def _data_parallel() -> None:
    wrapper: Any = torch.nn.DataParallel
    forward = wrapper.forward

    @functools.wraps(forward)
    def once(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        if not self.device_ids:
            return forward(self, *inputs, **kwargs)
        place = devices.cuda(self.device_ids[0])
        return self.module(*_moved(inputs, place), **_moved(kwargs, place))

    wrapper.forward = once


def _moved(value: Any, place: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return move(value, place)
    if isinstance(value, dict):
        return {key: _moved(item, place) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_moved(item, place) for item in value)
    return value
