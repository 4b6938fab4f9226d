"""Reads and sets the state of models that are sharded over ranks, and of their optimizers: FSDP and DTensors.

The state has the form of one process: complete tensors, and numbers for the optimizer's parameters. So it fits models
with another number of ranks, another kind of shards, or none. Reads, loads and `check` are collective.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from shoal_checkpoint.directories import CheckpointError
from shoal_checkpoint.torch import ranks

_WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")


def is_sharded(part: object) -> bool:
    """Whether a module has parameters or buffers that are sharded over ranks."""
    if not isinstance(part, torch.nn.Module):
        return False
    tensors = (*part.parameters(), *part.buffers())
    return any(hasattr(tensor, "device_mesh") for tensor in tensors) or bool(_fsdp1_modules(part))


def _fsdp1_modules(module: torch.nn.Module) -> list[Any]:
    return [each for each in module.modules() if type(each).__name__ == "FullyShardedDataParallel"]


def check(models: Mapping[str, torch.nn.Module]) -> None:
    """Raises CheckpointError on all ranks if the state of a sharded model cannot be saved."""
    for name, model in models.items():
        if not _has_state_functions():
            raise CheckpointError(
                f"{name}= is sharded over ranks, which needs torch 2.6 or later instead of {torch.__version__}. "
                "Fix: use such an image, or torch.distributed.checkpoint"
            )
        if not all(each._use_orig_params for each in _fsdp1_modules(model)):
            raise CheckpointError(
                f"{name}=: FullyShardedDataParallel has flattened its parameters, so its optimizer cannot be saved. "
                "Fix: FullyShardedDataParallel(..., use_orig_params=True)"
            )
        if len({tuple(names) for names in ranks.gather(list(_names(model).values()))}) > 1:
            raise CheckpointError(
                f"{name}= has other parameters on other ranks, as in pipeline parallelism. This helper saves models "
                "with the same parameters on all ranks. Fix: use torch.distributed.checkpoint"
            )


def _has_state_functions() -> bool:
    return tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 6)


def clean(name: str) -> str:
    """Returns the name of a parameter without the names of wrappers around modules."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _names(model: torch.nn.Module) -> dict[int, str]:
    """Returns the names of a model's parameters, by their identities."""
    return {id(parameter): clean(name) for name, parameter in model.named_parameters()}


def owner(optimizer: torch.optim.Optimizer, models: Mapping[str, torch.nn.Module]) -> torch.nn.Module | None:
    """Returns the sharded model that has an optimizer's parameters; None if there is none."""
    given = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return next((model for model in models.values() if given & set(_names(model))), None)


def read_model(model: torch.nn.Module) -> dict[str, Any]:
    """Returns the complete state on rank 0; on the others an empty one."""
    from torch.distributed.checkpoint import state_dict

    state = state_dict.get_model_state_dict(model, options=_options(model))
    return dict(state) if ranks.rank() == 0 else {}


def _options(model: torch.nn.Module) -> Any:
    from torch.distributed.checkpoint import state_dict

    # On the CPU, FSDP's own copy to the CPU would read memory that it has freed (torch 2.13).
    is_elsewhere = any(parameter.device.type != "cpu" for parameter in model.parameters())
    return state_dict.StateDictOptions(full_state_dict=True, cpu_offload=is_elsewhere)


def read_optimizer(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> dict[str, Any]:
    """Returns the complete state of a model's optimizer on rank 0; on the others an empty one."""
    from torch.distributed.checkpoint import state_dict

    state: Any = state_dict.get_optimizer_state_dict(model, optimizer, options=_options(model))
    if ranks.rank() != 0:
        return {}
    groups, names = state["param_groups"], _parameters(optimizer, model)
    numbers = {name: number for number, name in enumerate(names)}
    return {
        "state": {numbers[name]: dict(values) for name, values in state["state"].items()},
        "param_groups": [{**group, "params": [numbers[name] for name in group["params"]]} for group in groups],
    }


def _parameters(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> list[str]:
    """Returns the names of an optimizer's parameters, in the order in which it numbers them."""
    names = _names(model)
    return [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]


def load_model(model: torch.nn.Module, state: dict[str, Any]) -> None:
    from torch.distributed.checkpoint import state_dict

    state_dict.set_model_state_dict(model, state, options=state_dict.StateDictOptions(full_state_dict=True))


def load_optimizer(optimizer: torch.optim.Optimizer, model: torch.nn.Module, state: Mapping[str, Any]) -> None:
    from torch.distributed.checkpoint import state_dict

    names = _parameters(optimizer, model)
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    by_number = dict(zip(numbers, names))
    groups = [{**group, "params": [by_number[number] for number in group["params"]]} for group in state["param_groups"]]
    named = {by_number[number]: values for number, values in state["state"].items()}
    options = state_dict.StateDictOptions(full_state_dict=True)
    given = {"state": named, "param_groups": groups}
    state_dict.set_optimizer_state_dict(model, optimizer, given, options=options)  # type: ignore[arg-type]
