"""`smp.DistributedOptimizer`: an optimizer of a model that is on several stages.

It adds the loss scale, single-precision copies, sharded state, clipping, and state dicts of all stages.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from smdistributed.core.options import did_you_mean, only_known, warn_without_effect
from smdistributed.modelparallel.backend.exceptions import SMPRuntimeError, SMPUnsupportedError, StepUsageError
from smdistributed.modelparallel.torch.nn.module import split_of
from smdistributed.modelparallel.torch.nn.replacement import was_replaced
from smdistributed.modelparallel.torch.pipeline.tasks import current_task
from smdistributed.modelparallel.torch.script.clipping import clip_over_model
from smdistributed.modelparallel.torch.script.gradients import local_part
from smdistributed.modelparallel.torch.script.half_precision import LossScale, MasterWeights
from smdistributed.modelparallel.torch.script.model import DistributedModel, script_model
from smdistributed.modelparallel.torch.script.optimizer_states import OptimizerStates
from smdistributed.modelparallel.torch.script.state import state


class DistributedOptimizer(OptimizerStates):
    """Wraps the optimizer of a script (AWS API). It updates the parameters of this stage; the others have no gradients.

    It is a torch.optim.Optimizer because learning rate schedulers require one. Groups, state and defaults belong to the
    wrapped optimizer.

    With a dynamic loss scale, `step` skips a step if gradients overflowed on any rank. With `shard_optimizer_state`
    each replica keeps the gradients, copies and state of its share of the parameters, and sends the updated parameters.

    Args:
        optimizer: The optimizer to wrap.
        static_loss_scale: See `LossScale`. Used with `fp16` only: `model.backward` multiplies losses by the scale, and
            `step` and `update_master_grads` divide gradients by it.
        dynamic_loss_scale: See `LossScale`. Used with `fp16` only.
        dynamic_loss_args: See `LossScale`. Used with `fp16` only.

    Raises:
        StepUsageError: Before `smp.init`.
        SMPConfigError: If `dynamic_loss_args` is not allowed.
        SMPUnsupportedError: If it is the second optimizer, and the first one must have all parameters, or if it has
            an `update_master_grads` of its own.
    """

    _is_accelerate_prepared = True
    """Keeps accelerate from wrapping this: its wrapper would hide `local_state_dict`."""

    _step_supports_amp_scaling = False
    """Makes GradScaler skip steps itself: a fused optimizer would read attributes that this wrapper does not have."""

    @only_known
    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        static_loss_scale: float | None = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: Mapping[str, Any] | None = None,
    ) -> None:
        # Does not call the constructor of Optimizer, which would make groups and state of its own.
        self._state = state
        state.require()
        if hasattr(optimizer, "update_master_grads"):  # this class's methods would hide those, and nothing be trained
            raise SMPUnsupportedError(
                f"{type(optimizer).__name__} has single-precision copies of its own, which would not be updated. Fix: "
                "wrap its inner optimizer, and set 'fp16': true in mp_parameters."
            )
        scale = LossScale(static_loss_scale, dynamic_loss_scale, dynamic_loss_args)
        if not state.cfg.fp16 and (dynamic_loss_scale or scale.value != 1.0):
            warn_without_effect("The loss scale", "it is for 'fp16': true, and other gradients do not vanish")
        if not state.cfg.fp16:
            scale = LossScale(1.0, False, None)
        self.optimizer = optimizer
        self._is_sound = False
        self.master_weights = MasterWeights(
            optimizer,
            state.cfg.fp16 or state.cfg.bf16,
            scale,
            lambda: None if state.model is None else state.model.gradients,
            self._owns,
        )
        self._require_only_one()
        if state.cfg.sharded_data_parallel_degree > 1:
            self._global_grad_norm = 0.0
        if isinstance(state.model, DistributedModel):
            state.model.replace_parameters(optimizer)
        state.optimizer = self

    def _require_only_one(self) -> None:
        """Raises SMPUnsupportedError if a second optimizer would leave the parameters of the first untrained."""
        if self._state.optimizer is None:
            return
        first = self._state.optimizer.master_weights
        parameters, cfg = first.parameters(), self._state.cfg
        needs_all = cfg.fp16 or cfg.bf16 or any(parameter.is_meta for parameter in parameters)
        if needs_all and not {*first.model_parameters(parameters)}.intersection(self.master_weights.parameters()):
            raise SMPUnsupportedError(
                "This is the second smp.DistributedOptimizer, of other parameters than the first. With 'fp16', 'bf16' "
                "or delayed initialization only one works: the loss scale and the parameters' copies belong to it. "
                "Fix: give one optimizer all parameters, in groups."
            )

    def __getattr__(self, name: str) -> Any:
        """Returns an attribute of the wrapped optimizer. Raises AttributeError, with a hint, if it has none."""
        if "optimizer" not in self.__dict__:  # while it is copied
            raise AttributeError(name)
        inner = self.__dict__["optimizer"]
        if hasattr(inner, name):
            return getattr(inner, name)
        if name == "_global_grad_norm":
            raise AttributeError(f"{name!r} is there with 'sharded_data_parallel_degree' above 1.")
        hint = did_you_mean(name, (known for known in (*dir(type(self)), *dir(inner)) if not known.startswith("_")))
        raise AttributeError(
            f"smp.DistributedOptimizer has no attribute {name!r}, nor has the {type(inner).__name__} that it wraps."
            + hint
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a parameter group to the wrapped optimizer: see torch.optim.Optimizer.add_param_group."""
        self.optimizer.add_param_group(param_group)

    @property
    def overflow(self) -> bool:
        """Whether the gradients of the last update overflowed, on any rank."""
        return self.master_weights.overflow

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped because gradients overflowed. accelerate reads it."""
        return self.overflow

    @property
    def loss_scale(self) -> float:
        """The current factor of losses; 1 without `fp16`."""
        return self.master_weights.scale.value

    redefined_params = False
    """Whether the library updates other parameters than the model's. With `shard_optimizer_state` AWS's does."""

    # --- inside a step

    def backward(self, loss: torch.Tensor, update_master_grads: bool = False) -> None:
        """Calls `model.backward(loss)`, which multiplies by the loss scale (AWS API before 1.10).

        Args:
            loss: The loss of this microbatch.
            update_master_grads: Must be False: other microbatches have no gradients yet.

        Raises:
            StepUsageError: If `update_master_grads` is true, or there is no `DistributedModel`.
        """
        if update_master_grads:
            raise StepUsageError(
                "optimizer.backward(update_master_grads=True) is called in a step, before all microbatches have "
                "gradients. Fix: leave it out, and call optimizer.update_master_grads() after the step."
            )
        script_model(self._state).backward(loss)

    # --- outside a step

    def zero_grad(self, set_to_none: bool | None = None, set_grads_to_None: bool | None = None) -> None:  # noqa: N803
        """Resets the gradients, as the wrapped optimizer does. Gradients of parameters that have copies become None.

        Args:
            set_to_none: See torch.optim.Optimizer.zero_grad. None: the wrapped optimizer's default.
            set_grads_to_None: The name of `set_to_none` before AWS API 1.10.

        Raises:
            StepUsageError: Inside a step.
        """
        _refuse_in_step("zero_grad")
        chosen = set_to_none if set_grads_to_None is None else set_grads_to_None
        # optimizers that scripts of before 1.10 bring along have the old name only
        is_old = "set_grads_to_None" in inspect.signature(self.optimizer.zero_grad).parameters
        name = "set_grads_to_None" if is_old else "set_to_none"
        self.optimizer.zero_grad(**({} if chosen is None else {name: chosen}))
        if self._state.model is not None:
            self._state.model.gradients.were_scaled = False
        self.master_weights.forget_gradients()

    def update_master_grads(self) -> None:
        """Averages gradients over replicas, and divides the optimizer's by the loss scale; all ranks call it.

        With `fp16` or `bf16`, the optimizer's single-precision copies of parameters get the divided gradients. `.grad`
        of the model's half-precision parameters is averaged, but not divided.

        With a dynamic loss scale, `overflow` then says whether any gradient overflowed, on any rank.

        Raises:
            StepUsageError: Inside a step, or if gradients were not computed by `model.backward`.
        """
        _refuse_in_step("update_master_grads")
        self.master_weights.unscale()

    def clip_master_grads(self, max_norm: float, norm_type: float = 2.0) -> float:
        """Scales the gradients down so that their norm over all stages is at most `max_norm`; all ranks call it.

        First calls `update_master_grads` if the script has not, which may raise StepUsageError.

        Args:
            max_norm: The largest norm that is allowed.
            norm_type: The p of the p-norm; inf for the largest absolute value.

        Returns:
            The norm before clipping; -1 if gradients overflowed.
        """
        if not self.master_weights.is_unscaled:
            self.update_master_grads()
        if self.overflow:
            return -1.0
        parameters = self.master_weights.with_gradients()
        return clip_over_model(self._state, parameters, max_norm, norm_type)

    def step(self, closure: Any = None) -> Any:
        """Updates the parameters of this stage. If gradients overflowed on any rank, updates the loss scale only.

        All ranks call it. First calls `update_master_grads` if the script has not. At the end, single-precision copies
        are rounded into the model.

        Args:
            closure: See torch.optim.Optimizer.step.

        Returns:
            The result of the wrapped optimizer; None if the step is skipped.

        Raises:
            StepUsageError: Inside a step, or if gradients were not computed by `model.backward`.
            SMPRuntimeError: If tensor parallelism has replaced parameters of the optimizer.
            SMPUnsupportedError: If the optimizer uses norms of whole parameters that tensor parallelism splits.
        """
        _refuse_in_step("step")
        if not self._is_sound:
            _require_sound_updates(self.optimizer)
            self._is_sound = True
        master = self.master_weights
        if not master.is_unscaled:
            self.update_master_grads()
        master.is_unscaled = False
        master.scale.update(self.overflow)
        if self.overflow:
            return None
        if self._state.cfg.sharded_data_parallel_degree > 1:
            self._clip_sharded()
        shards = self._shards
        for parameter in self.master_weights.parameters() if shards else ():
            if not self._owns(parameter):
                parameter.grad = None  # a script may have set it
        result = self.optimizer.step(closure)
        master.write_back()
        if shards:
            shards.send_updated()
        return result

    def _clip_sharded(self) -> None:
        """Clips by `sdp_gradient_clipping`, unless that is 0. Keeps the norm before, which published scripts read."""
        most = self._state.cfg.sdp_gradient_clipping or float("inf")
        parameters = self.master_weights.with_gradients()
        self._global_grad_norm = clip_over_model(self._state, parameters, most, 2.0)

    @property
    def fp16_groups(self) -> list[list[nn.Parameter]]:
        """The model's parameters of each group, which are split with `sharded_data_parallel_degree` (AWS API 1.11)."""
        weights = self.master_weights
        return [weights.model_parameters(group["params"]) for group in self.optimizer.param_groups]

    @property
    def fp32_partitioned_groups_flat(self) -> list[torch.Tensor]:
        """A float32 copy of this rank's parts of each group's parameters, one after the other (AWS API 1.11)."""
        groups = ([local_part(p.detach()).flatten() for p in group["params"]] for group in self.optimizer.param_groups)
        return [torch.cat(parts).float() for parts in groups]

    @property
    def ds_param_shard_group(self) -> Any:
        """torch's group of the ranks that hold one replica together (AWS API 1.11).

        Raises StepUsageError before the model is placed, or without `sharded_data_parallel_degree`.
        """
        shards = script_model(self._state).shards
        if shards is None:
            raise StepUsageError(
                "The model is not sharded. Fix: set 'sharded_data_parallel_degree', and wrap the model."
            )
        return shards.group

    def reload_model_params(self, model: Any = None, optimizer: Any = None) -> None:
        """Sets the single-precision copies to the model's parameters.

        Call it after something else has changed the parameters. It can be a hook of the model, which passes `model`
        and `optimizer`; both are ignored.
        """
        self.master_weights.refresh()


def _refuse_in_step(name: str) -> None:
    """Raises StepUsageError inside a step: its body runs on the first stage alone, once for each microbatch."""
    if current_task() is not None:
        raise StepUsageError(
            f"optimizer.{name}() is called inside a step: the other stages would not call it. Fix: call it after the "
            "function under @smp.step, on all ranks."
        )


_NORMS = ("Lamb", "LAMB", "LARS", "Adafactor", "LBFGS", "Muon")
"""Optimizers that use norms of whole parameters. FusedLAMB and FusedNovoGrad know which ones are split."""


def _require_sound_updates(optimizer: torch.optim.Optimizer) -> None:
    """Raises an error if tensor parallelism makes the optimizer update other parameters, or by other numbers."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if any(map(was_replaced, parameters)):
        raise SMPRuntimeError(
            "The optimizer has parameters of modules that tensor parallelism has replaced: it would not train the new "
            "ones. Fix: create the optimizer after smp.DistributedModel, of model.parameters()."
        )
    if type(optimizer).__name__ in _NORMS and any(map(split_of, parameters)):
        raise SMPUnsupportedError(
            f"{type(optimizer).__name__} uses the norms of whole parameters, and tensor parallelism splits some. Fix: "
            "use smp.optimizers.FusedLAMB or FusedNovoGrad, or an optimizer that updates each element on its own, such "
            "as AdamW."
        )
