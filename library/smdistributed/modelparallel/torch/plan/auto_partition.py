"""Automatic partition: a trace of the model on the meta device decides which stage has which module.

If a model cannot be traced, its parameters decide.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from smdistributed.modelparallel.backend.config import Config
from smdistributed.modelparallel.backend.partition import (
    STATE_BYTES,
    Partition,
    cut,
    group_overlapping,
    relative_costs,
    shares,
)
from smdistributed.modelparallel.torch.plan.trace import Trace, trace

_log = logging.getLogger("smdistributed.modelparallel")


@dataclass(frozen=True)
class Items:
    """The modules that are assigned to stages, in the order of execution.

    They cost something, have no children, or share a tensor with others. `costs` are shares of the model's. `together`
    has groups of places of modules that use the same tensor, and must be on one stage.
    """

    names: list[str]
    costs: list[float]
    together: list[list[int]]


def auto_partition(root: nn.Module, config: Config, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Partition:
    """Places nothing. If the model cannot be traced, it warns and does as with `skip_tracing`."""
    if config.skip_tracing:
        return partition(root, config, Trace())
    try:
        found = trace(root, args, kwargs)
    except Exception as error:  # any model, any reason
        found = Trace()
        _log.warning(
            "The model cannot be traced without values (%s: %s): it is cut by its parameters, in the order of its "
            "construction. Fix: use smp.partition to cut it yourself.",
            *(type(error).__name__, error),
        )
    return partition(root, config, found)


def partition(root: nn.Module, config: Config, found: Trace) -> Partition:
    """Chooses stages by a trace; places nothing. Raises SMPConfigError if there are fewer modules than stages."""
    modules = dict(root.named_modules())
    given = items(root, config, found)
    result = cut(given.costs, given.names, given.together, config.partitions)
    stages = _place(modules, dict(zip(given.names, result.stages)))
    return Partition(
        stages, shares(given.costs, result.stages, config.partitions), result.largest / (result.optimum or 1)
    )


def items(root: nn.Module, config: Config, found: Trace) -> Items:
    """Lists what `partition` assigns to stages: modules by first use, their costs, and groups that stay together."""
    modules = dict(root.named_modules())
    costs = _costs(modules, found, config)
    groups = _together(modules, found)
    tied = set().union(*groups)  # a module that only uses another one's parameter costs nothing
    ordered = _in_order(modules, found.order)
    names = [name for name in ordered if costs[name] or name in tied or not any(_children(modules, name))]
    place = {name: index for index, name in enumerate(names)}
    return Items(names, [costs[name] for name in names], [sorted(place[name] for name in group) for group in groups])


def _costs(modules: Mapping[str, nn.Module], found: Trace, config: Config) -> dict[str, float]:
    """Returns costs without children. Shared parameters count once. Without a trace only memory counts."""
    seen: set[int] = set()
    memory = {}
    for name, module in modules.items():
        own = [p for p in module._parameters.values() if p is not None and id(p) not in seen]
        seen.update(map(id, own))
        kept = sum(p.numel() * p.element_size() for p in own) * STATE_BYTES
        memory[name] = kept + found.activation_bytes[name] * min(config.active_microbatches, config.microbatches)
    operations = [found.operations[name] for name in modules]
    return dict(zip(modules, relative_costs(list(memory.values()), operations, config.memory_weight)))


def _in_order(modules: Mapping[str, nn.Module], called: Mapping[str, int], name: str = "") -> Iterator[str]:
    """Yields names in the order of first calls, `called`; containers come before their children."""
    yield name
    last = 0
    places = {}
    for child in _children(modules, name):
        last = called.get(child, last)  # one that is never called stays behind its predecessor
        places[child] = last
    for child in sorted(places, key=places.__getitem__):
        yield from _in_order(modules, called, child)


def _children(modules: Mapping[str, nn.Module], name: str) -> Iterator[str]:
    prefix = f"{name}." if name else ""
    return (f"{prefix}{child}" for child in modules[name]._modules if f"{prefix}{child}" in modules)


def _together(modules: Mapping[str, nn.Module], found: Trace) -> list[set[str]]:
    """Groups of modules that share a parameter, or use a tensor of each other's."""
    names = list(modules)
    parameters = ({id(p) for p in module._parameters.values() if p is not None} for module in modules.values())
    groups = group_overlapping([{name, *own, *found.uses.get(name, ())} for name, own in zip(names, parameters)])
    return [{names[place] for place in group} for group in groups]


def _place(modules: Mapping[str, nn.Module], placed: Mapping[str, int]) -> dict[str, int]:
    """The stage of every module. A container that is not in `placed` is on the first stage of its children."""
    stages = dict(placed)
    for name in reversed(list(modules)):
        if name not in stages:
            stages[name] = min(stages[child] for child in _children(modules, name))
    return {name: stages[name] for name in modules}
