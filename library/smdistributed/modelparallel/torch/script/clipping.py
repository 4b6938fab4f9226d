"""Patches of torch.nn.utils.clip_grad_norm_, to clip by the norm over all stages and shares, and of clip_grad_value_.

Scripts and trainers clip `model.parameters()`. With the norm of one stage alone, each stage would scale its gradients
by a different factor, without any error. If all given parameters are on one stage, such as the result of
`local_parameters`, it is their norm, and no other stage has to call. Both functions clip the gradients that the next
update uses. With a loss scale, gradients are unscaled before they are clipped, and all ranks must call.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad

from smdistributed.modelparallel.torch.script.gradients import clip_gradients
from smdistributed.modelparallel.torch.script.state import TorchState, state


def install() -> None:
    """Replaces torch's functions in every module that has imported them by now, under any name."""
    for name, patch in (("clip_grad_norm_", _patch_norm), ("clip_grad_value_", _patch_value)):
        found: Any = getattr(clip_grad, name)
        original = getattr(found, "_smp_original", found)
        patched = patch(original) if found is original else found
        patched._smp_original = original
        _replace(original, patched)


def updated_parameters(state: TorchState, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Finishes the averages over replicas, which all of them call. See `MasterWeights.updated`."""
    if state.model is not None:
        state.model.gradients.finish_averages()
    return list(parameters) if state.optimizer is None else state.optimizer.master_weights.updated(parameters)


def clip_over_model(
    state: TorchState, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float, group: str = "MP_GROUP"
) -> float:
    """Clips as `clip_gradients` does, by the norm over a group, or over a sharded replica. All its ranks call it."""
    if state.cfg.shard_optimizer_state:  # each replica has the gradients of its share
        group = {"MP_GROUP": "WORLD", "TP_GROUP": "DP_GROUP"}[group]
    ranks = (state.model and state.model.shard_ranks) or state.group(group)
    return clip_gradients(
        parameters,
        max_norm,
        norm_type,
        lambda part: state.objects.gather(part, ranks),
        only_shares=state.rank != state.group("TP_GROUP")[0],
    )


def _replace(original: Any, patched: Any) -> None:
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", {})
        for name in [name for name, value in list(names.items()) if value is original]:
            names[name] = patched


def _patch_norm(original: Any) -> Any:
    """Wraps torch's function: if parameters are on several ranks, it clips by the norm over all, which all call.

    With `error_if_nonfinite` it raises RuntimeError if that norm is not finite.
    """

    @functools.wraps(original)
    def clip_grad_norm_(
        parameters: torch.Tensor | Iterable[torch.Tensor],
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        given, stages = _find_updated(parameters)
        in_parts = (state.model and state.model.shard_ranks) or state.cfg.shard_optimizer_state
        shared = stages and (len(state.group("TP_GROUP")) > 1 or in_parts)
        if len(stages) < 2 and not shared:
            return original(given, max_norm, norm_type, error_if_nonfinite, *args, **kwargs)
        group = "TP_GROUP" if len(stages) < 2 else "MP_GROUP"
        norm = clip_over_model(state, given, float(max_norm), float(norm_type), group)
        if error_if_nonfinite and not norm < float("inf"):
            raise RuntimeError(
                f"The norm of the gradients over all stages is {norm}: they have not been clipped. Fix: lower the "
                "learning rate, or pass error_if_nonfinite=False."
            )
        return torch.tensor(norm)

    return clip_grad_norm_


def _patch_value(original: Any) -> Any:
    """Clips the gradients that the next update uses. For the model's parameters all ranks call it."""

    @functools.wraps(original)
    def clip_grad_value_(parameters: torch.Tensor | Iterable[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        return original(_find_updated(parameters)[0], *args, **kwargs)

    return clip_grad_value_


def _find_updated(parameters: torch.Tensor | Iterable[torch.Tensor]) -> tuple[list[Any], set[int]]:
    """Returns the parameters that the next update uses, and the stages of the model's. With any, all ranks call it."""
    given: list[Any] = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    model, optimizer = state.model, state.optimizer
    originals = optimizer.master_weights.model_parameters(given) if optimizer else given
    stages = set() if model is None or not model.partitioned else model.manager.stages_of(originals)
    return updated_parameters(state, given) if stages else given, stages
