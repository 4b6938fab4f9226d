"""Activation checkpointing: activations of modules are computed again in backward, alone or in groups."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from smdistributed.core.options import only_known, warn_without_effect
from smdistributed.modelparallel.torch.pipeline.offloading import checkpoint

_MARK = "_smp_checkpointing"


@dataclass(frozen=True)
class Checkpointing:
    """`group`: how many children of a sequence are checkpointed together; 0: all consecutive ones on one stage."""

    preserve_rng_state: bool
    group: int


@only_known
def set_activation_checkpointing(
    module: nn.Module, preserve_rng_state: bool = True, pack_args_as_tuple: bool = False, strategy: str = "each"
) -> None:
    """Makes a module compute its activations again in backward instead of keeping them (AWS API).

    Args:
        module: The module; its calls are checkpointed while gradients are computed.
        preserve_rng_state: Whether the second computation draws the same random numbers.
        pack_args_as_tuple: No effect, and a warning: children get the output of the child before, as in any sequence.
            It has no effect in AWS's library either, from 1.9 on.
        strategy: For nn.Sequential: "each" child on its own, "contiguous" ones of a stage together, or "group_N".

    Raises:
        ValueError: If there is no such strategy.
    """
    if pack_args_as_tuple:
        warn_without_effect("pack_args_as_tuple", "children get the output of the child before, as in any sequence")
    found = re.fullmatch(r"each|contiguous|group_([1-9]\d*)", strategy)
    if not found:
        raise ValueError(
            f"The strategy is {strategy!r}. Allowed: 'each', 'contiguous' or 'group_N', with N from 1 on. Fix: pass "
            "one."
        )
    group = {"each": 1, "contiguous": 0}.get(strategy) if found[1] is None else int(found[1])
    module.__dict__[_MARK] = Checkpointing(preserve_rng_state, group or 0)


def remove_checkpointing(root: nn.Module) -> None:
    for module in root.modules():
        module.__dict__.pop(_MARK, None)


def active_checkpointing(module: nn.Module) -> Checkpointing | None:
    """How a module is checkpointed now; None if it is not, or no gradients are computed."""
    mark: Checkpointing | None = module.__dict__.get(_MARK)
    return mark if mark and torch.is_grad_enabled() else None


def run_checkpointed(call: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls `call(module, *args, **kwargs)`, checkpointed if that is set for it and gradients are computed."""
    how = active_checkpointing(module)
    if how is None:
        return call(module, *args, **kwargs)
    return checkpoint(call, module, *args, preserve_rng_state=how.preserve_rng_state, **kwargs)


def run_sequence(modules: Sequence[nn.Module], value: Any, how: Checkpointing | None) -> Any:
    """Calls modules one after the other. `how`: how to checkpoint them; None: not at all."""
    if how is None:
        return _one_by_one(modules, value)
    size = how.group or max(1, len(modules))
    for begin in range(0, len(modules), size):
        group = modules[begin : begin + size]
        value = checkpoint(_one_by_one, group, value, preserve_rng_state=how.preserve_rng_state)
    return value


def _one_by_one(modules: Sequence[nn.Module], value: Any) -> Any:
    for module in modules:
        value = module(value)
    return value
