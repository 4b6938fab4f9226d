"""Single-precision copies of half-precision parameters, which the script's optimizer updates, and the loss scale."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

import torch
import torch.distributed as dist
from torch import nn

from smdistributed.core.torch.devices import device_of
from smdistributed.modelparallel.backend.exceptions import StepUsageError
from smdistributed.modelparallel.torch.script.gradient_norms import largest_element
from smdistributed.modelparallel.torch.script.loss_scale import LossScale
from smdistributed.modelparallel.torch.script.step_gradients import StepGradients


class MasterWeights:
    """The part that `fp16` and `bf16` add to an optimizer. Without them there are no copies, and the loss scale is 1.

    Args:
        optimizer: Its parameter groups get the copies.
        enabled: Whether half-precision parameters get copies.
        scale: The loss scale.
        gradients: Returns the gradients of the script's model, or None as long as there is no model.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        enabled: bool,
        scale: LossScale,
        gradients: Callable[[], StepGradients | None],
    ) -> None:
        self._optimizer, self._enabled, self.scale, self._gradients = optimizer, enabled, scale, gradients
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
        """Sets the gradients of the model's parameters that have copies to None: none are unscaled now.

        The gradients of the copies stay.
        """
        self.is_unscaled = False  # GradScaler may have skipped the step
        for parameter in self.copies:
            parameter.grad = None

    def unscale(self) -> None:
        """Makes the gradients ready for the update; all ranks call it.

        It averages over replicas, copies gradients to single precision and divides them by the loss scale. With a
        dynamic scale, it finds out whether any overflowed, on any rank.

        Raises:
            StepUsageError: If the gradients were not computed by `model.backward`.
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
            torch._foreach_div_(found, self.scale.value)
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
        """Lists the parameters that the next update uses for these; all ranks call it if there is a loss scale.

        Without a loss scale and without copies it changes nothing: the caller averages gradients.

        Args:
            parameters: Parameters of the model, or copies.

        Returns:
            The parameters, or their copies if they have any, with averaged and unscaled gradients.
        """
        given, copies = list(parameters), set(self.copies.values())
        if not self.is_unscaled and self.scale.value == 1.0 and copies.isdisjoint(given):
            return given  # the update has yet to copy them
        if not self.is_unscaled:
            self.unscale()
        return [self.copies.get(parameter, parameter) for parameter in given]

    def make_copies(self) -> None:
        """Replaces half-precision parameters of the optimizer by copies. Those that have one keep it.

        Without `fp16` and `bf16` it does nothing. Parameters without elements, of other stages, get no copy.
        """
        for group in self._optimizer.param_groups if self._enabled else ():
            for place, parameter in enumerate(group["params"]):
                if parameter.dtype in (torch.float16, torch.bfloat16) and parameter.numel():
                    copy = nn.Parameter(parameter.detach().float(), parameter.requires_grad)
                    group["params"][place] = self.copies[parameter] = copy

    def model_parameters(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Returns the parameters, with copies replaced by the model's own.

        Their order stays. Parameters other than copies stay too.
        """
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
        """Loads what `values` returned.

        Values that do not round to their parameter are dropped: they belong to another model.
        """
        parameters = self.parameters()
        for number, value in values.items():
            copy = parameters[number]
            (parameter,) = self.model_parameters([copy])
            if parameter is not copy and torch.equal(value.to(parameter), parameter.data):
                copy.data.copy_(value)

    def parameters(self) -> list[nn.Parameter]:
        """The optimizer's parameters, in the order of their numbers."""
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    def with_gradients(self, of_model: bool = False) -> list[nn.Parameter]:
        """The optimizer's parameters that have gradients; `of_model`: the model's own instead of their copies."""
        parameters = self.model_parameters(self.parameters()) if of_model else self.parameters()
        return [p for p in parameters if p.grad is not None]
