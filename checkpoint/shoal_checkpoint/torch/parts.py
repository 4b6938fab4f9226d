"""The objects to save: models, optimizers and anything else with a state_dict, and plain dicts.

A dict belongs to its rank. Everything else is the same on all ranks, so that the state of rank 0 is for all. Models
that are sharded over ranks (`sharded`) give their complete state, and take their shards of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any

import torch

from shoal_checkpoint.directories import CheckpointError
from shoal_checkpoint.torch import sharded

RESERVED = ("shoal", "structure")
_MOST_DIFFERENCES = 3


def check(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the objects without the wrappers of data parallelism and torch.compile, so that both load each other's.

    Raises TypeError if one has no state, and ValueError if a name is reserved. Raises CheckpointError if a model is
    sharded in a way that cannot be saved.
    """
    for name, part in parts.items():
        if name in RESERVED:
            raise ValueError(f"{name}=: this name is reserved. Fix: choose another")
        has_state = hasattr(part, "state_dict") and hasattr(part, "load_state_dict")
        if not has_state and not isinstance(part, dict):
            raise TypeError(
                f"{name}={part!r}: its state cannot be saved. Allowed: a dict, or an object with state_dict() and "
                "load_state_dict(). Fix: give it these methods, or put its values into a dict"
            )
    found = {name: _unwrap(part) for name, part in parts.items()}
    sharded.check(_sharded(found))
    return found


def _sharded(parts: Mapping[str, Any]) -> dict[str, torch.nn.Module]:
    return {name: part for name, part in parts.items() if sharded.is_sharded(part)}


def _unwrap(part: Any) -> Any:
    while isinstance(part, torch.nn.Module):
        inner = getattr(part, "_orig_mod", None)  # torch.compile's
        if type(part).__name__ in ("DistributedDataParallel", "DataParallel"):
            inner = part.module
        if inner is None:
            break
        part = inner
    return part


def read_shared(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the state of each object but dicts. The tensors are those that the training changes.

    A collective call if a model is sharded. Its state, and its optimizer's, are complete on rank 0 and empty elsewhere.
    """
    models, state = _sharded(parts), {}
    for name, part in parts.items():
        if isinstance(part, torch.nn.Module):
            state[name] = sharded.read_model(part) if name in models else _read_module(part)
        elif isinstance(part, torch.optim.Optimizer) and (model := sharded.owner(part, models)) is not None:
            state[name] = sharded.read_optimizer(part, model)
        elif not isinstance(part, dict):
            state[name] = part.state_dict()
    return state


def _read_module(module: torch.nn.Module) -> dict[str, Any]:
    """Returns the state without the names of wrappers around inner modules, such as torch.compile's."""
    return {sharded.clean(name): value for name, value in module.state_dict().items()}


def read_dicts(parts: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {name: dict(part) for name, part in parts.items() if isinstance(part, dict)}


def kinds(parts: Mapping[str, Any]) -> dict[str, str]:
    """Returns the class of each object that is not a module: the state of one optimizer does not fit another."""
    return {
        name: "module" if isinstance(part, torch.nn.Module) else type(part).__qualname__ for name, part in parts.items()
    }


def load(parts: Mapping[str, Any], saved: Mapping[str, Any], saved_kinds: Mapping[str, str]) -> None:
    """Sets the state of each object but dicts to the result of `read_shared`, if all of it fits; else nothing changes.

    Raises CheckpointError, which says what differs, and has no fix yet.
    """
    if set(parts) != set(saved_kinds):
        raise CheckpointError(f"it has {_names(saved_kinds)}, and this script saves {_names(parts)}.")
    for name, kind in kinds(parts).items():
        if kind != saved_kinds[name]:
            raise CheckpointError(f"its {name} is of class {saved_kinds[name]} instead of {kind}.")
    for name, part in parts.items():
        if isinstance(part, torch.nn.Module):
            _compare(name, _read_module(part), saved[name])
        elif isinstance(part, torch.optim.Optimizer):
            _compare_groups(name, part.state_dict(), saved[name])
    models = _sharded(parts)
    for name, state in saved.items():
        _load(parts[name], state, models)


def _load(part: Any, state: Any, models: Mapping[str, torch.nn.Module]) -> None:
    model = sharded.owner(part, models) if isinstance(part, torch.optim.Optimizer) else None
    if model is not None:
        sharded.load_optimizer(part, model, state)
    elif not isinstance(part, torch.nn.Module):
        part.load_state_dict(state)
    elif any(part is each for each in models.values()):
        sharded.load_model(part, state)
    else:
        part.load_state_dict({name: state[sharded.clean(name)] for name in part.state_dict()})


def load_dicts(parts: Mapping[str, Any], saved: Mapping[str, dict[str, Any]]) -> None:
    """Sets the dicts, in place. Tensors go to the devices of those that they replace."""
    for name, values in saved.items():
        part = parts[name]
        devices = {key: value.device for key, value in part.items() if isinstance(value, torch.Tensor)}
        part.clear()
        part.update({key: value.to(devices[key]) if key in devices else value for key, value in values.items()})


def add_dicts(parts: Mapping[str, Any], gone: Mapping[str, dict[str, Any]]) -> None:
    """Adds the numbers and tensors in the dicts of a rank that is gone: they are running sums."""
    for name, values in gone.items():
        part = parts[name]
        for key, value in values.items():
            if isinstance(value, (int, float, torch.Tensor)) and not isinstance(value, bool) and key in part:
                part[key] = part[key] + (value.to(part[key].device) if isinstance(value, torch.Tensor) else value)


def _names(names: Mapping[str, Any]) -> str:
    return ", ".join(sorted(names)) or "nothing"


def _compare(name: str, state: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    def differences() -> Any:
        yield from (f"{key} is missing" for key in state if key not in saved)
        yield from (f"{key} is not in this model" for key in saved if key not in state)
        for key in state:
            if key in saved and _layout(state[key]) != _layout(saved[key]):
                yield f"{key} is {_layout(saved[key])} instead of {_layout(state[key])}"

    if found := list(islice(differences(), _MOST_DIFFERENCES)):
        raise CheckpointError(f"its {name} is another one: {', '.join(found)}.")


def _layout(value: Any) -> str:
    return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else ""


def _compare_groups(name: str, state: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    sizes, saved_sizes = ([len(group["params"]) for group in each["param_groups"]] for each in (state, saved))
    if sizes != saved_sizes:
        raise CheckpointError(f"its {name} has {saved_sizes} parameters in its groups instead of {sizes}.")
