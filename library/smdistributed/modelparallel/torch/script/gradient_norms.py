"""Norms of gradients, and clipping by the norm over all stages. Each GPU is waited for once, not once per tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch


def clip_gradients(
    parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float, gather: Callable[[float], Sequence[Any]]
) -> float:
    """Scales gradients down, in place, so that their norm over all stages is at most `max_norm`.

    Args:
        parameters: Their gradients are scaled. Those without a gradient are ignored.
        max_norm: The largest norm that is allowed.
        norm_type: The p of the p-norm; inf for the largest absolute value.
        gather: Exchanges this stage's part of the norm with the other stages; returns the parts of all.

    Returns:
        The norm before clipping. If it is NaN, gradients stay as they are.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    infinite = norm_type == float("inf")
    if infinite:
        part = largest_element(gradients)
    else:
        part = sum(float((norms**norm_type).sum()) for norms in _norms(gradients, norm_type))
    parts = gather(part)
    total = _maximum(parts) if infinite else sum(parts) ** (1 / norm_type)
    if total > max_norm and gradients:
        torch._foreach_mul_(gradients, max_norm / (total + 1e-6))
    return float(total)


def largest_element(gradients: Sequence[torch.Tensor]) -> float:
    """The largest absolute value of all gradients; 0 without any. It is inf or NaN if an element is."""
    return _maximum(float(norms.max()) for norms in _norms(gradients, float("inf")))


def _maximum(values: Iterable[float]) -> float:
    """Returns the maximum; NaN if a value is, wherever it stands, as in torch.

    Without values it is 0.
    """
    found = list(values)
    return next((value for value in found if math.isnan(value)), max(found, default=0.0))


def _norms(gradients: Sequence[torch.Tensor], norm_type: float) -> Iterator[torch.Tensor]:
    """Yields the norms of all gradients of a device in one tensor: reading it waits for that device once.

    The norms are float64, and computed in single precision or better. Gradients without elements are left out.
    """
    found: dict[torch.device, list[torch.Tensor]] = {}
    for gradient in gradients:
        if gradient.numel():
            wide = torch.promote_types(gradient.dtype, torch.float32)  # a norm in float16 overflows
            found.setdefault(gradient.device, []).append(torch.linalg.vector_norm(gradient, norm_type, dtype=wide))
    for norms in found.values():
        yield torch.stack([norm.double() for norm in norms])
