"""State dicts of a model that is on several stages: each stage has a part, and loads its part."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from smdistributed.modelparallel.torch.pipeline.module_manager import ModuleManager

_PARTIAL_KEY = "_smp_is_partial"
"""By this key AWS's library tells names of its own modules from Hugging Face's."""


def select_local(manager: ModuleManager) -> dict[str, Any]:
    """Returns entries of modules of this stage. Tensors share the memory of the model."""
    local = {name for name, _ in manager.local_modules()}
    return {key: value for key, value in manager.root.state_dict().items() if key.rpartition(".")[0] in local}


def merge_parts(manager: ModuleManager, parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Merges the parts of all stages, in the order of the model's own state dict. Other keys are left out."""
    found = {key: value for part in parts for key, value in part.items()}
    return {key: found[key] for key in manager.root.state_dict() if key in found}


def load_local(manager: ModuleManager, state_dict: Mapping[str, Any], strict: bool) -> None:
    """Ignores other stages' entries. With `strict`, missing and unexpected keys raise RuntimeError."""
    local, own = set(select_local(manager)), manager.root.state_dict()
    wanted = OrderedDict((key, value) for key, value in state_dict.items() if key in local)
    # Without versions, torch assumes an old BatchNorm, and fills in buffers that are on other stages.
    wanted._metadata = getattr(state_dict, "_metadata", None) or own._metadata  # type: ignore[attr-defined]
    missing = sorted(local - _with_aliases(manager.root, wanted))
    unexpected = sorted(set(state_dict) - set(own) - {_PARTIAL_KEY})
    if strict and (missing or unexpected):
        raise RuntimeError(
            f"load_state_dict: missing keys: {', '.join(missing) or 'none'}; "
            f"unexpected keys: {', '.join(unexpected) or 'none'}. Fix: give strict=False to load what fits."
        )
    manager.root.load_state_dict(wanted, strict=False)


def fill_in_parameters(manager: ModuleManager, whole: Mapping[str, Any]) -> None:
    """Every parameter must have a value. Buffers without one stay as they are. Gradients move to the CPU."""
    for name, parameter in manager.root.named_parameters():
        parameter.data = whole[name]
        if parameter.grad is not None:
            parameter.grad = parameter.grad.cpu()
    for name, module in manager.modules.items():
        for key in [key for key, buffer in module._buffers.items() if buffer is not None]:
            module._buffers[key] = whole.get(f"{name}.{key}" if name else key, module._buffers[key])


def _with_aliases(module: nn.Module, names: Iterable[str]) -> set[str]:
    """Adds other names of the same parameters: files of safetensors have a tied parameter once."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    known = {id(parameters[name]) for name in names if name in parameters}
    return {*names, *(name for name, parameter in parameters.items() if id(parameter) in known)}
