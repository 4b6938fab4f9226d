"""Optimizers that published scripts import. AWS's are from apex; these compute the same in plain torch.

FusedLAMB: "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", arXiv 1904.00962.
FusedNovoGrad: "Stochastic Gradient Methods with Layer-wise Adaptive Moments", arXiv 1905.11286.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from smdistributed.modelparallel.backend.exceptions import SMPConfigError
from smdistributed.modelparallel.torch.nn.module import split_of
from smdistributed.modelparallel.torch.nn.tensor_group import tensor_group
from smdistributed.modelparallel.torch.script.gradients import local_part
from smdistributed.modelparallel.torch.script.sharding import make_whole, replicate_like
from smdistributed.modelparallel.torch.script.state import state

__all__ = ["FusedAdam", "FusedLAMB", "FusedLamb", "FusedNovoGrad"]


class _Layerwise(torch.optim.Optimizer):
    """The base of optimizers that update one parameter at a time.

    A group counts its steps in `step`, as apex's optimizers do: the schedule of AWS's BERT script reads it there.
    """

    def __init__(
        self, params: Iterable[Any], defaults: dict[str, Any], amsgrad: bool = False, set_grad_none: bool = True
    ) -> None:
        if amsgrad:
            raise SMPConfigError(f"{type(self).__name__} has no AMSGrad. Fix: leave out amsgrad.")
        super().__init__(params, defaults)
        self._set_grad_none = set_grad_none

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Resets gradients: see torch. `set_to_none` defaults to the constructor's `set_grad_none`."""
        super().zero_grad(self._set_grad_none if set_to_none is None else set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates parameters that have gradients, and counts the step in each group. All stages of a model call it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._begin()
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group, self.state[parameter])
        return loss

    def _begin(self) -> None:
        """Called once in each step, before parameters are updated."""

    def _update(self, parameter: nn.Parameter, group: dict[str, Any], own: dict[str, Any]) -> None:
        """Updates one parameter in place, by its gradient. `own` is its state, which may be empty and is changed."""
        raise NotImplementedError


class FusedAdam(_Layerwise):
    """Adam, with weight decay in the gradient or beside the moments (apex's arguments).

    Args:
        params: Parameters or groups of them.
        lr: The learning rate.
        bias_correction: Whether moments are corrected for their beginning at 0.
        betas: The decay of the first and the second moment.
        eps: Added to the root of the second moment.
        adam_w_mode: Whether weight decay is beside the moments, as AdamW has it, or in the gradient.
        weight_decay: The fraction of a parameter that is added to its update or its gradient.
        amsgrad: Must be False.
        set_grad_none: Whether `zero_grad` removes gradients.

    Raises:
        SMPConfigError: For `amsgrad`.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults, amsgrad, set_grad_none)
        self._decays_beside = adam_w_mode

    def _update(self, parameter: nn.Parameter, group: dict[str, Any], own: dict[str, Any]) -> None:
        """As apex's FusedAdam."""
        assert parameter.grad is not None
        update = _adam_update(parameter, parameter.grad, group, own, 1 - group["betas"][0], self._decays_beside)
        parameter.sub_(update, alpha=group["lr"])


def _adam_update(
    parameter: nn.Parameter,
    gradient: torch.Tensor,
    group: dict[str, Any],
    own: dict[str, Any],
    share: float,
    decays_beside: bool,
) -> torch.Tensor:
    """Moves the moments in `own`, of which the first takes `share` of the gradient. Returns the step, with decay."""
    (beta1, beta2), decay = group["betas"], group["weight_decay"]
    if decay and not decays_beside:
        gradient = gradient + decay * parameter
    first = own.setdefault("exp_avg", torch.zeros_like(parameter))
    second = own.setdefault("exp_avg_sq", torch.zeros_like(parameter))
    first.mul_(beta1).add_(gradient, alpha=share)
    second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    age = group["step"] if group["bias_correction"] else float("inf")
    update: torch.Tensor = (first / (1 - beta1**age)) / ((second / (1 - beta2**age)).sqrt() + group["eps"])
    return update + decay * parameter if decay and decays_beside else update


class FusedLAMB(_Layerwise):
    """Adam with each parameter's step scaled to the parameter's norm (apex's arguments).

    Args:
        params: Parameters or groups of them.
        lr: The learning rate.
        bias_correction: Whether moments are corrected for their beginning at 0.
        betas: The decay of the first and the second moment.
        eps: Added to the root of the second moment.
        weight_decay: The fraction of a parameter that is added to its update.
        amsgrad: Must be False.
        adam_w_mode: Whether weight decay is beside the moments, as AdamW has it, or in the gradient.
        grad_averaging: Whether a gradient enters the first moment with 1 - beta1, or whole.
        set_grad_none: Whether `zero_grad` removes gradients.
        max_grad_norm: Gradients are scaled down to this norm of all, over all stages; 0: they are not.
        use_nvlamb: Whether parameters without weight decay are scaled to their norm too.

    Raises:
        SMPConfigError: For `amsgrad`.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "grad_averaging": grad_averaging,
            "max_grad_norm": max_grad_norm,
        }
        super().__init__(params, defaults, amsgrad, set_grad_none)
        self._decays_beside, self._scales_all, self._norm = adam_w_mode, use_nvlamb, 0.0

    def _begin(self) -> None:
        """Computes the norm of all gradients; all stages call it."""
        self._norm = _norm_over_stages([p for group in self.param_groups for p in group["params"]])

    def _update(self, parameter: nn.Parameter, group: dict[str, Any], own: dict[str, Any]) -> None:
        """As apex's FusedLAMB. With weight decay or `use_nvlamb`, the step is scaled to the parameter's norm."""
        most, share = group["max_grad_norm"], 1 - group["betas"][0] if group["grad_averaging"] else 1.0
        assert parameter.grad is not None
        gradient = parameter.grad / (self._norm / most if most and self._norm > most else 1.0)
        update = _adam_update(parameter, gradient, group, own, share, self._decays_beside)
        ratio = torch.ones((), device=parameter.device)
        if group["weight_decay"] or self._scales_all:
            size, change = _whole_norms(parameter, parameter, update)
            ratio = torch.where((size > 0) & (change > 0), size / change, ratio)
        parameter.sub_(update * (group["lr"] * ratio))


FusedLamb = FusedLAMB
"""The name in AWS's guide."""


class FusedNovoGrad(_Layerwise):
    """Momentum of gradients, each scaled by a moving norm of its parameter's gradient (apex's arguments).

    Args:
        params: Parameters or groups of them.
        lr: The learning rate.
        bias_correction: Whether moments are corrected for their beginning at 0.
        betas: The decay of the first moment, and of the norm.
        eps: Added to the norm.
        weight_decay: The fraction of a parameter that is added to its update.
        amsgrad: Must be False.
        reg_inside_moment: Whether weight decay is part of the moment.
        grad_averaging: Whether a gradient enters the moment with 1 - beta1, or whole.
        norm_type: 2, or 0 for the largest element.
        init_zero: Whether the moving norm begins at 0, or at the first gradient's.
        set_grad_none: Whether `zero_grad` removes gradients.

    Raises:
        SMPConfigError: For `amsgrad`, and for another `norm_type`.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        reg_inside_moment: bool = False,
        grad_averaging: bool = True,
        norm_type: int = 2,
        init_zero: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        if norm_type not in (0, 2):
            raise SMPConfigError(
                f"norm_type of FusedNovoGrad is {norm_type!r}. Allowed: 2, or 0 for the maximum. Fix: pass one of "
                "these."
            )
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "grad_averaging": grad_averaging,
            "norm_type": norm_type,
            "init_zero": init_zero,
        }
        super().__init__(params, defaults, amsgrad, set_grad_none)
        self._decays_inside = reg_inside_moment

    def _update(self, parameter: nn.Parameter, group: dict[str, Any], own: dict[str, Any]) -> None:
        """As apex's FusedNovoGrad. Without `reg_inside_moment`, weight decay goes into the step alone."""
        beta1, beta2 = group["betas"]
        assert parameter.grad is not None
        (size,) = _whole_norms(parameter, parameter.grad, largest=group["norm_type"] == 0)
        before = own.get("norm", torch.zeros_like(size) if group["init_zero"] else size)
        if group["norm_type"] == 0:
            own["norm"] = beta2 * before + (1 - beta2) * size
        else:
            own["norm"] = (beta2 * before**2 + (1 - beta2) * size**2).sqrt()
        age = group["step"] if group["bias_correction"] else float("inf")
        norm = own["norm"] / (1 - beta2**age) ** 0.5 + group["eps"]
        change = parameter.grad / norm
        if self._decays_inside:
            change = change + group["weight_decay"] * parameter
        first = own.setdefault("exp_avg", torch.zeros_like(parameter))
        first.mul_(beta1).add_(change, alpha=1 - beta1 if group["grad_averaging"] else 1.0)
        update = first / (1 - beta1**age)
        if not self._decays_inside:
            update = update + group["weight_decay"] * parameter
        parameter.sub_(update, alpha=group["lr"])


def _whole_norms(parameter: nn.Parameter, *tensors: torch.Tensor, largest: bool = False) -> list[torch.Tensor]:
    """Returns the 2-norms, or the largest elements, of tensors that are split as `parameter` is. TP_GROUP calls it."""
    norms = [tensor.abs().max() if largest else tensor.norm() for tensor in tensors]
    if split_of(parameter) is None:
        return norms
    found = torch.stack([make_whole(norm) for norm in norms])
    if largest:
        dist.all_reduce(found, dist.ReduceOp.MAX, group=tensor_group().group)
    else:
        dist.all_reduce(found.square_(), group=tensor_group().group)
        found.sqrt_()
    return [replicate_like(norm, parameter) for norm in found.unbind()]


def _norm_over_stages(parameters: Sequence[nn.Parameter]) -> float:
    """Returns the 2-norm of the gradients; over all stages, which then call it, if one is a parameter of the model."""
    given = [parameter for parameter in parameters if parameter.grad is not None]
    if not _updated_ids().intersection(map(id, parameters)):
        return math.sqrt(_square_of(given))
    # A rank of TP_GROUP counts its shares. Of gradients that all its ranks have, it counts a part.
    shares = [parameter for parameter in given if split_of(parameter)]
    whole = [parameter for parameter in given if not split_of(parameter)]
    degree, shards = len(state.group("TP_GROUP")), state.model and state.model.shard_ranks
    square = _square_of(shares) + _square_of(whole) / degree
    # With sharded optimizer state every replica has the gradients of its share, otherwise all of them.
    ranks = state.group("WORLD" if state.cfg.shard_optimizer_state else "MP_GROUP")
    return math.sqrt(sum(state.objects.gather(square, shards or ranks)))


def _square_of(parameters: Iterable[nn.Parameter]) -> float:
    return sum(float(local_part(p.grad).float().square().sum()) for p in parameters if p.grad is not None)


def _updated_ids() -> set[int]:
    """The ids of the placed model's parameters, and of their copies in single precision; empty before it is placed."""
    if not state.initialized or state.model is None or not state.model.partitioned:
        return set()
    copies = state.optimizer.master_weights.copies.values() if state.optimizer else ()
    return set(map(id, (*state.model.module.parameters(), *copies)))
