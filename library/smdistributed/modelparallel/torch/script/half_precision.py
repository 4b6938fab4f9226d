"""`fp16` and `bf16` (AWS API 1.10): casts of the model, the loss scale, and single-precision copies for the optimizer.

The model computes in half precision, and the script in single precision. Losses are multiplied by the scale, so that
half-precision gradients do not underflow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from smdistributed.core.options import did_you_mean
from smdistributed.core.torch.devices import device_of
from smdistributed.modelparallel.backend.exceptions import SMPConfigError, SMPRuntimeError, StepUsageError
from smdistributed.modelparallel.torch.nn.module import copy_split
from smdistributed.modelparallel.torch.plan.construction import cast
from smdistributed.modelparallel.torch.script.gradients import StepGradients, largest_element, local_part


def convert(module: nn.Module, dtype: torch.dtype) -> None:
    """Casts in place; Parameter objects stay. Raises SMPRuntimeError if this device cannot compute in that dtype."""
    _require_support(module, dtype)
    apply: Any = module._apply
    apply(lambda tensor: cast(tensor, dtype) if tensor.is_floating_point() else tensor)


def to_half(value: Any, dtype: torch.dtype) -> Any:
    """Casts float32 tensors to `dtype`, also inside tuples and lists. Other objects, also dicts, stay as they are."""
    return _map_tensors(value, lambda tensor: tensor.to(dtype) if tensor.dtype == torch.float32 else tensor)


def to_single(value: Any, dtype: torch.dtype) -> Any:
    """Casts tensors of `dtype` to float32, where `to_half` casts them."""
    return _map_tensors(value, lambda tensor: tensor.float() if tensor.dtype == dtype else tensor)


def _map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Tensors in nested tuples and lists count. Anything else, also a dict, is returned as it is."""
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


_DYNAMIC = {
    "init_scale": 2.0**32,
    "scale_factor": 2.0,
    "scale_window": 1000,
    "min_scale": 1.0,
    "delayed_shift": 1,
    "consecutive_hysteresis": False,
}


class LossScale:
    """A static scale, or a dynamic one that depends on overflows of gradients. A static one does not detect them.

    A dynamic one is divided by `scale_factor` when gradients overflow, down to `min_scale`, and multiplied by it after
    `scale_window` steps without an overflow. It begins at `init_scale`, and shrinks at the `delayed_shift`-th overflow.
    They are counted since it last grew; with `consecutive_hysteresis`, since the last step without an overflow. Raises
    SMPConfigError if `arguments` has another name, or a value that is not allowed.
    """

    def __init__(self, static: float | None, dynamic: bool, arguments: Mapping[str, Any] | None) -> None:
        self._args = {**_DYNAMIC, **_checked(arguments or {})}
        self.is_dynamic, self._good_steps = dynamic, 0
        self._hysteresis = int(self._args["delayed_shift"])
        self.value = float(self._args["init_scale"] if dynamic else 1.0 if static is None else static)

    def update(self, overflow: bool) -> None:
        """A dynamic scale falls after `delayed_shift` overflows, and rises after `scale_window` good steps."""
        if not self.is_dynamic:
            return
        if overflow:
            self._good_steps = 0
            if self._hysteresis > 1:
                self._hysteresis -= 1
            else:
                self.value = max(self.value / self._args["scale_factor"], self._args["min_scale"])
            return
        self._good_steps += 1
        grows = self._good_steps % self._args["scale_window"] == 0
        if grows or self._args["consecutive_hysteresis"]:
            self._hysteresis = int(self._args["delayed_shift"])
        if grows:
            self.value *= self._args["scale_factor"]

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "good_steps": self._good_steps, "hysteresis": self._hysteresis}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned. A static scale stays as the script set it."""
        if self.is_dynamic:
            self.value, self._good_steps = saved["value"], saved["good_steps"]
            self._hysteresis = saved.get("hysteresis", self._hysteresis)


def _checked(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    for name, value in arguments.items():
        if name not in _DYNAMIC:
            hint = did_you_mean(name, _DYNAMIC) or f" Allowed: {', '.join(_DYNAMIC)}."
            raise SMPConfigError(
                f"dynamic_loss_args has {name!r}, which is unknown.{hint} Fix: correct it, or leave it out."
            )
        least = 1 if name in ("scale_window", "delayed_shift") else 0
        if name != "consecutive_hysteresis" and not (isinstance(value, (int, float)) and value >= least):
            raise SMPConfigError(
                f"{name!r} of dynamic_loss_args is {value!r}. Allowed: a number from {least} on. Fix: pass one."
            )
    return arguments


class MasterWeights:
    """The copies and the loss scale that `fp16` and `bf16` add to an optimizer. Without, the loss scale is 1.

    The optimizer's parameter groups get the copies. `gradients` returns None as long as there is no model. `owns` says
    whether this rank updates a parameter: others get no copy.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        enabled: bool,
        scale: LossScale,
        gradients: Callable[[], StepGradients | None],
        owns: Callable[[nn.Parameter], bool] = lambda _: True,
    ) -> None:
        self._optimizer, self._enabled, self.scale, self._gradients = optimizer, enabled, scale, gradients
        self._owns = owns
        self.copies: dict[nn.Parameter, nn.Parameter] = {}
        """The copies, by the model's parameters."""
        self.overflow = False
        """Whether the gradients of the last update overflowed, on any rank."""
        self.is_unscaled = False
        """Whether the gradients of the next update are ready: averaged, and divided by the loss scale."""

    def note_new_gradients(self) -> None:
        """Notes that a step has computed gradients: they must be unscaled, even if old ones were not reset."""
        self.is_unscaled = False

    def forget_gradients(self) -> None:
        """Sets the gradients of parameters that have copies to None. The gradients of the copies stay."""
        self.is_unscaled = False  # GradScaler may have skipped the step
        for parameter in self.copies:
            parameter.grad = None

    def unscale(self) -> None:
        """Averages over replicas, copies gradients to single precision and divides them by the loss scale.

        All ranks call it. With a dynamic scale, it finds out whether any overflowed, on any rank. Raises StepUsageError
        if they were not computed by `model.backward`.
        """
        gradients = self._gradients()
        if gradients is not None:
            gradients.finish_averages()
            self._require_scaled_losses(gradients)
        self.make_copies()
        for parameter, copy in self.copies.items():
            if parameter.grad is None:  # scripts reset the model's gradients by hand, and not the copies'
                copy.grad = None
        self.overflow = False
        found = []
        for parameter in self.with_gradients(of_model=True):
            gradient = parameter.grad
            assert gradient is not None
            if parameter in self.copies:
                gradient = self.copies[parameter].grad = gradient.float()
            found.append(gradient)
        if self.scale.value != 1.0 and found:
            torch._foreach_div_([local_part(gradient) for gradient in found], self.scale.value)
        # Not only if this stage has copies: another one may have some, and would wait for this one.
        if self.scale.is_dynamic:
            flag = torch.tensor([float(not math.isfinite(largest_element(found)))], device=device_of(None))
            dist.all_reduce(flag)
            self.overflow = bool(flag.item())
        self.is_unscaled = True

    def _require_scaled_losses(self, gradients: StepGradients) -> None:
        """Raises StepUsageError if gradients would be divided by a loss scale that multiplied no loss."""
        if self.scale.value != 1.0 and not gradients.were_scaled and self.with_gradients(of_model=True):
            raise StepUsageError(
                "Gradients were computed without model.backward, and would be divided by the loss scale "
                f"({self.scale.value:g}), which multiplied no loss. Fix: call model.backward(loss) instead of "
                "loss.backward()."
            )

    def updated(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Returns the parameters, or copies of them, that the next update uses, with averaged and unscaled gradients.

        All ranks call it if there is a loss scale. Otherwise, without copies, it changes nothing: the caller averages.
        """
        given, copies = list(parameters), set(self.copies.values())
        is_scaled = self.scale.value != 1.0 or self.scale.is_dynamic
        if not self.is_unscaled and not is_scaled and copies.isdisjoint(given):
            return given  # the update has yet to copy them
        if not self.is_unscaled:
            self.unscale()
        return [self.copies.get(parameter, parameter) for parameter in given]

    def make_copies(self) -> None:
        """Replaces the optimizer's half-precision parameters by copies. Empty ones, of other stages, get none."""
        for group in self._optimizer.param_groups if self._enabled else ():
            for place, parameter in enumerate(group["params"]):
                is_half = parameter.dtype in (torch.float16, torch.bfloat16)
                if is_half and parameter.numel() and self._owns(parameter):
                    copy = nn.Parameter(parameter.detach().float(), parameter.requires_grad)
                    copy_split(parameter, copy)
                    group["params"][place] = self.copies[parameter] = copy

    def model_parameters(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Returns the parameters in their order, with copies replaced by the model's own."""
        originals = {id(copy): parameter for parameter, copy in self.copies.items()}
        return [originals.get(id(parameter), parameter) for parameter in parameters]

    def write_back(self) -> None:
        """Rounds the copies into the model's parameters."""
        for parameter, copy in self.copies.items():
            parameter.data.copy_(copy.data)

    def refresh(self) -> None:
        """Sets the copies to the model's parameters, which something other than the optimizer has changed."""
        for parameter, copy in self.copies.items():
            copy.data.copy_(parameter.data)

    def values(self) -> dict[int, torch.Tensor]:
        """The copies' values, by the numbers of their parameters in the optimizer."""
        copies = set(self.copies.values())
        return {number: p.data for number, p in enumerate(self.parameters()) if p in copies}

    def load_values(self, values: Mapping[int, torch.Tensor]) -> None:
        """Values that do not round to their parameter are dropped: they belong to another model."""
        parameters = self.parameters()
        for number, value in values.items():
            copy = parameters[number]
            (parameter,) = self.model_parameters([copy])
            rounded = local_part(value).to(parameter.device, parameter.dtype)
            if parameter is not copy and torch.equal(rounded, local_part(parameter.data)):
                copy.data.copy_(value)

    def parameters(self) -> list[nn.Parameter]:
        """The optimizer's parameters, in the order of their numbers."""
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    def with_gradients(self, of_model: bool = False) -> list[nn.Parameter]:
        """The optimizer's parameters that have gradients; `of_model`: the model's own instead of their copies."""
        parameters = self.model_parameters(self.parameters()) if of_model else self.parameters()
        return [p for p in parameters if p.grad is not None]
