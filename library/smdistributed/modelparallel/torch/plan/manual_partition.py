"""Partition by hand: `smp.partition` and `smp.set_partition`. Importing this changes nothing in torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from smdistributed.modelparallel.backend.exceptions import SMPConfigError
from smdistributed.modelparallel.torch.pipeline.module_manager import ModuleManager
from smdistributed.modelparallel.torch.pipeline.module_routing import routing_manager

_PARTITION = "_smp_partition"
_active_partitions: list[int] = []
_constructed: list[Callable[[nn.Module], None]] = []
"""Called with each new module, after the constructor of nn.Module itself."""


@contextmanager
def partition(index: int) -> Iterator[None]:
    """Puts modules that are constructed inside `with` into a partition; of nested ones the innermost counts (AWS API).

    The first use patches the constructor of nn.Module.

    Args:
        index: The partition, from 0.
    """
    note_constructions(_note_partition)
    _active_partitions.append(index)
    try:
        yield
    finally:
        _active_partitions.pop()


def set_partition(module: nn.Module, index: int) -> None:
    """Puts a module, and its descendants that have no partition of their own, into a partition (AWS API).

    Args:
        module: A part of the script's model.
        index: The partition, from 0.

    Raises:
        SMPConfigError: If the module is already placed on another stage.
    """
    manager = routing_manager()
    placed = manager.stage_of(module) if manager else None
    if placed is not None and placed != index:
        raise SMPConfigError(
            f"smp.set_partition: the module is in partition {placed} already, and cannot go to {index}. Fix: call it "
            "before the model's first step, and with 1 partition for index 0 only."
        )
    module.__dict__[_PARTITION] = index


def has_partition(module: nn.Module) -> bool:
    return _PARTITION in module.__dict__


def manual_stages(manager: ModuleManager, default: int, partitions: int) -> dict[str, int]:
    """Returns the stages that `smp.partition` and `smp.set_partition` gave.

    Modules without a partition have their parent's, and the model `default`. Modules that share a parameter are on the
    stage of the first one. Raises SMPConfigError if a partition does not exist.
    """
    stages: dict[str, int] = {}
    owners: dict[int, int] = {}
    for name, module in manager.modules.items():
        inherited = stages[name.rpartition(".")[0]] if name else default
        stage = module.__dict__.get(_PARTITION, inherited)
        if not 0 <= stage < partitions:
            raise SMPConfigError(
                f"{name or 'The model'} is put into partition {stage}. Allowed: 0 to {partitions - 1}. Fix: name one "
                "of these, or raise 'partitions'."
            )
        for parameter in module._parameters.values():
            if parameter is not None:
                stage = owners.setdefault(id(parameter), stage)
        stages[name] = stage
    return stages


def note_constructions(on_constructed: Callable[[nn.Module], None]) -> None:
    """Calls a function with each new module from now on. The first use patches nn.Module.__init__."""
    if on_constructed not in _constructed:
        _constructed.append(on_constructed)
    if getattr(nn.Module.__init__, "_smp", False):
        return
    original = nn.Module.__init__

    def __init__(self: nn.Module, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        original(self, *args, **kwargs)
        for call in _constructed:
            call(self)

    __init__._smp = True  # type: ignore[attr-defined]
    nn.Module.__init__ = __init__  # type: ignore[method-assign]


def _note_partition(module: nn.Module) -> None:
    if _active_partitions:
        module.__dict__[_PARTITION] = _active_partitions[-1]
