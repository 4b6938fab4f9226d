"""`fp16` and `bf16`: the model computes in half precision, the script in single precision (AWS API 1.10)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from smdistributed.modelparallel.backend.exceptions import SMPRuntimeError
from smdistributed.modelparallel.torch.plan.construction import cast


def convert(module: nn.Module, dtype: torch.dtype) -> None:
    """Casts floating-point parameters and buffers of a model in place; the Parameter objects stay.

    Args:
        module: The model.
        dtype: torch.float16 or torch.bfloat16.

    Raises:
        SMPRuntimeError: If this device cannot compute in that dtype, as the CPU with an old torch.
    """
    _require_support(module, dtype)
    apply: Any = module._apply
    apply(lambda tensor: cast(tensor, dtype) if tensor.is_floating_point() else tensor)


def to_half(value: Any, dtype: torch.dtype) -> Any:
    """Casts float32 tensors to `dtype`, also inside tuples and lists. Other objects, also dicts, stay as they are."""
    return _map_tensors(value, lambda tensor: tensor.to(dtype) if tensor.dtype == torch.float32 else tensor)


def to_single(value: Any, dtype: torch.dtype) -> Any:
    """Casts tensors of `dtype` to float32, also inside tuples and lists.

    Other objects, also dicts, stay as they are.
    """
    return _map_tensors(value, lambda tensor: tensor.float() if tensor.dtype == dtype else tensor)


def _map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Applies `change` to a tensor, or to those in nested tuples and lists.

    Anything else, also a dict, is returned as it is.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_map_tensors(item, change) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)(_map_tensors(item, change) for item in value)
    return value


def _require_support(module: nn.Module, dtype: torch.dtype) -> None:
    """Raises SMPRuntimeError if the model has Linear or LayerNorm modules that fail in this dtype. It tries both."""
    one = torch.ones(1, 1, dtype=dtype, device="cuda" if torch.cuda.is_available() else "cpu")
    probes: tuple[tuple[type[nn.Module], Callable[[], Any]], ...] = (
        (nn.Linear, lambda: functional.linear(one, one, one[0])),
        (nn.LayerNorm, lambda: functional.layer_norm(one, (1,))),
    )
    for kind, probe in probes:
        try:
            if any(isinstance(part, kind) for part in module.modules()):
                probe()
        except RuntimeError as error:
            name = str(dtype).removeprefix("torch.")
            raise SMPRuntimeError(
                f"The model has {kind.__name__} modules, which torch {torch.__version__} does not compute in {name} on "
                f"this device ({error}). Fix: train on a GPU, rehearse with torch 2.2 or newer, or leave out 'fp16'."
            ) from error
