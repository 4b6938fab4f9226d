"""The patch of nn.Module.__call__ that sends calls of modules to their stages. Importing this changes nothing.

Also adds hooks to the outputs of calls, which backward calls with their gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from smdistributed.modelparallel.backend.schedule import TurnKind
from smdistributed.modelparallel.torch.pipeline.activations import run_checkpointed
from smdistributed.modelparallel.torch.pipeline.module_manager import ModuleManager, placement_of

_manager: ModuleManager | None = None
"""Knows where modules are. torch has one nn.Module.__call__ for all models, so that there can be only one."""


def routing_manager() -> ModuleManager | None:
    """The manager that calls are routed by; None as long as no model is placed."""
    return _manager


def route_calls(manager: ModuleManager) -> None:
    """Routes calls of a placed model's modules to their stages. The first use patches nn.Module.__call__.

    The patch also checkpoints activations, and calls the children of a split sequence one by one. At the begin of a
    part, it lets urgent turns go first. Modules of other models pay for one look into a dictionary.
    """
    global _manager
    _manager = manager
    if getattr(nn.Module.__call__, "_smp", False):
        return
    original = nn.Module.__call__

    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        placement, manager = placement_of(self), _manager
        if placement is None or manager is None:
            return original(self, *args, **kwargs)
        if placement.stage != manager.index:
            return manager.call_remote(placement, args, kwargs)
        if placement.begins_part:
            manager.make_way(TurnKind.FORWARD)
        if isinstance(self, nn.Sequential) and manager.is_split(self):
            outputs = manager.call_sequence(placement, self, *args)
        else:
            outputs = run_checkpointed(original, self, args, kwargs)
        if placement.begins_part:
            add_backward_hook(outputs, lambda _: manager.make_way(TurnKind.BACKWARD))
        return outputs

    __call__._smp = True  # type: ignore[attr-defined]
    nn.Module.__call__ = __call__  # type: ignore[method-assign]


@contextmanager
def calls_routed_by(manager: ModuleManager) -> Iterator[None]:
    global _manager
    before, _manager = _manager, manager
    try:
        yield
    finally:
        _manager = before


def add_backward_hook(outputs: Any, hook: Callable[[torch.Tensor], None]) -> None:
    """Registers a hook on each tensor of these outputs that requires grad: backward calls it with the gradient."""
    if isinstance(outputs, torch.Tensor):
        if outputs.requires_grad:
            outputs.register_hook(hook)  # type: ignore[no-untyped-call]
    elif isinstance(outputs, (tuple, list)):
        for output in outputs:
            add_backward_hook(output, hook)
    elif isinstance(outputs, Mapping):
        for output in outputs.values():
            add_backward_hook(output, hook)
