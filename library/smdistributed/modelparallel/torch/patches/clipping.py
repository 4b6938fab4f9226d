"""`torch.nn.utils.clip_grad_norm_` of a whole model that is on several stages: by its norm over all of them.

Scripts and trainers clip `model.parameters()`. By the norm of one stage alone each stage would scale its gradients by
another factor, and nobody would notice. What is given decides: of parameters that are all on one stage (those of
`local_parameters`, say) the norm is theirs, and no other stage has to call.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch.nn.utils import clip_grad

from smdistributed.modelparallel.torch.optimizer import clip
from smdistributed.modelparallel.torch.state_mod import state


def install() -> None:
    """Have torch's function ask where the parameters are, under whatever name modules have imported it.

    Doing so again finds what was imported since.
    """
    found: Any = clip_grad.clip_grad_norm_
    original = getattr(found, "_smp_original", found)
    _replace(original, _asking(original) if found is original else found)


def _replace(original: Any, by: Any) -> None:
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", {})
        for name in [name for name, value in list(names.items()) if value is original]:
            names[name] = by


def _asking(original: Any) -> Any:
    @functools.wraps(original)
    def clip_grad_norm_(
        parameters: torch.Tensor | Iterable[torch.Tensor],
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        model = state.model
        if model is None or not model.partitioned or not model.manager.spans_stages(given):
            return original(given, max_norm, norm_type, error_if_nonfinite, *args, **kwargs)
        norm = clip(given, float(max_norm), float(norm_type))
        if error_if_nonfinite and not norm < float("inf"):
            raise RuntimeError(f"The norm of the gradients over all stages is {norm}: they have not been clipped.")
        return torch.tensor(norm)

    clip_grad_norm_._smp_original = original  # type: ignore[attr-defined]
    return clip_grad_norm_
