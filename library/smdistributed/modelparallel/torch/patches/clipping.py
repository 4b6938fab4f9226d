"""`torch.nn.utils.clip_grad_norm_` and `clip_grad_value_` of a model's parameters: by the norm over all stages.

Scripts and trainers clip `model.parameters()`. By the norm of one stage alone each stage would scale its gradients by
another factor, and nobody would notice. What is given decides: of parameters that are all on one stage (those of
`local_parameters`, say) the norm is theirs, and no other stage has to call. With a loss scale, the gradients that are
clipped are those without it, and all ranks call.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch.nn.utils import clip_grad

from smdistributed.modelparallel.torch.optimizer import clip, models, updated
from smdistributed.modelparallel.torch.state_mod import state


def install() -> None:
    """Have torch's functions ask where the parameters are, under whatever name modules have imported them.

    Doing so again finds what was imported since.
    """
    for name, asking in (("clip_grad_norm_", _norm_asking), ("clip_grad_value_", _value_asking)):
        found: Any = getattr(clip_grad, name)
        original = getattr(found, "_smp_original", found)
        by = asking(original) if found is original else found
        by._smp_original = original
        _replace(original, by)


def _replace(original: Any, by: Any) -> None:
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", {})
        for name in [name for name, value in list(names.items()) if value is original]:
            names[name] = by


def _norm_asking(original: Any) -> Any:
    @functools.wraps(original)
    def clip_grad_norm_(
        parameters: torch.Tensor | Iterable[torch.Tensor],
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        given, stages = _placed(parameters)
        if len(stages) < 2:
            return original(given, max_norm, norm_type, error_if_nonfinite, *args, **kwargs)
        norm = clip(given, float(max_norm), float(norm_type))
        if error_if_nonfinite and not norm < float("inf"):
            raise RuntimeError(f"The norm of the gradients over all stages is {norm}: they have not been clipped.")
        return torch.tensor(norm)

    return clip_grad_norm_


def _value_asking(original: Any) -> Any:
    @functools.wraps(original)
    def clip_grad_value_(parameters: torch.Tensor | Iterable[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        return original(_placed(parameters)[0], *args, **kwargs)

    return clip_grad_value_


def _placed(parameters: torch.Tensor | Iterable[torch.Tensor]) -> tuple[list[Any], set[int]]:
    """What has the gradients of these that the next step will apply, and the stages of those of the model."""
    given: list[Any] = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    model = state.model
    stages = set() if model is None or not model.partitioned else model.manager.stages_of(models(given))
    return updated(given) if stages else given, stages
