"""Automatic mixed precision: torch.autocast("cuda") is the CPU's autocast, in the same dtype if the CPU has it.

GradScaler works on CPU tensors, also in versions of torch that have no kernels for that.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.amp import autocast_mode

from shoal_rehearsal.torch.half_kernels import HAS_HALF
from shoal_rehearsal.torch.overrides import OVERRIDES


def patch(_: int) -> None:
    """Patches autocast for "cuda" to use the CPU's, with bfloat16 if float16 can't be computed.

    GradScaler gets kernels if torch has none for the CPU (before 2.3).
    """
    autocast: Any = autocast_mode.autocast
    initialise = autocast.__init__

    @functools.wraps(initialise)
    def on_cpu(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        initialise(self, device_type, *args, **kwargs)
        if device_type == "cuda":
            self.device = "cpu"
            if self.fast_dtype is torch.float16 and not HAS_HALF:
                self.fast_dtype = torch.bfloat16

    autocast.__init__ = on_cpu
    enabled = torch.is_autocast_enabled
    torch.is_autocast_enabled = lambda device_type="cpu": (
        torch.is_autocast_cpu_enabled() if device_type in ("cpu", "cuda") else enabled(device_type)
    )
    if not _has_unscale():
        # the first argument is the mode
        OVERRIDES[torch._amp_foreach_non_finite_check_and_unscale_] = lambda _, *args: _check_and_unscale(*args)
        OVERRIDES[torch._amp_update_scale_] = lambda _, *args: _update_scale(*args)


def _has_unscale() -> bool:
    """Whether the CPU has the kernel that GradScaler needs (torch 2.3 and later)."""
    try:
        torch._amp_foreach_non_finite_check_and_unscale_([torch.ones(1)], torch.zeros(1), torch.ones(1))
    except (RuntimeError, NotImplementedError):
        return False
    return True


def _check_and_unscale(grads: list[torch.Tensor], found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
    """Multiplies gradients by `inv_scale`, in place; sets `found_inf` to 1 if one of them is not finite."""
    for grad in grads:
        if not bool(grad.isfinite().all()):
            found_inf.fill_(1.0)
        grad.mul_(inv_scale.to(grad.dtype))


def _update_scale(
    scale: torch.Tensor, tracker: torch.Tensor, found_inf: torch.Tensor, growth: float, backoff: float, interval: int
) -> torch.Tensor:
    """Updates the scale in place, counts the steps since its last change in `tracker`, and returns the scale."""
    steps = 0 if bool(found_inf) else int(tracker) + 1
    if bool(found_inf):
        scale.mul_(backoff)
    elif steps == interval:
        scale.mul_(growth)
        steps = 0
    tracker.fill_(steps)
    return scale
