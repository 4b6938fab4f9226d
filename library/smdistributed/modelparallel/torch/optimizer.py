"""`smp.DistributedOptimizer`: an optimizer of a model that is on several stages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map

from smdistributed.core.options import did_you_mean, only_known, warn_without_effect
from smdistributed.core.torch.devices import device_of
from smdistributed.modelparallel.backend.exceptions import SMPRuntimeError, SMPUnsupportedError, StepUsageError
from smdistributed.modelparallel.torch.loss_scale import LossScale
from smdistributed.modelparallel.torch.reducer import broadcast_in_buckets
from smdistributed.modelparallel.torch.state_mod import state
from smdistributed.modelparallel.torch.work import current

_OF_SHARDS = ("_global_grad_norm", "ds_param_shard_group", "fp16_groups", "fp32_partitioned_groups_flat")
"""What scripts ask for with `sharded_data_parallel_degree`."""


class DistributedOptimizer(torch.optim.Optimizer):
    """Wraps the optimizer of a script (AWS API). It steps what is on this stage: the rest has no gradients.

    It is a torch.optim.Optimizer because learning rate schedulers ask for one; groups, state and defaults are those of
    the wrapped optimizer.

    static_loss_scale, dynamic_loss_scale, dynamic_loss_args: see `LossScale`. They have an effect with `fp16` alone:
        `model.backward` multiplies losses by the scale, `step` and `update_master_grads` divide gradients by it. With a
        dynamic scale, `step` leaves out a step whose gradients overflowed on any rank.

    With `shard_optimizer_state` each replica keeps the state of its share of the parameters, and sends the others what
    it has updated.
    """

    _is_accelerate_prepared = True
    """Has accelerate leave it as it is: its own wrapper would hide `local_state_dict`."""

    _step_supports_amp_scaling = False
    """Has GradScaler leave out a step itself: a fused optimizer asks its own attributes, which are not this one's."""

    @only_known
    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        static_loss_scale: float | None = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: Mapping[str, Any] | None = None,
    ) -> None:
        # Without the constructor of Optimizer, which would make groups and state of its own.
        state.require()
        self.optimizer = optimizer
        self.scale = LossScale(static_loss_scale, dynamic_loss_scale, dynamic_loss_args)
        if not state.cfg.fp16:
            if dynamic_loss_scale or self.scale.value != 1.0:
                warn_without_effect("The loss scale", "it is for 'fp16': true, and other gradients do not vanish")
            self.scale = LossScale(1.0, False, None)
        self.overflow = False
        self._unscaled = False
        self._masters: dict[nn.Parameter, nn.Parameter] = {}
        self._owners: dict[nn.Parameter, int] = {}
        self._require_one()
        if state.model is not None:
            state.model.give_made_parameters(optimizer)
        state.optimizer = self

    def _require_one(self) -> None:
        """Raises SMPUnsupportedError where a second optimizer would leave the first one's parameters untrained."""
        if state.optimizer is None:
            return
        first = state.optimizer._parameters()
        special = state.cfg.fp16 or state.cfg.bf16 or any(parameter.is_meta for parameter in first)
        if special and not {*models(first)}.intersection(self._parameters()):
            raise SMPUnsupportedError(
                "This is the second smp.DistributedOptimizer, of other parameters than the first. With 'fp16', 'bf16' "
                "or delayed initialization only one works: the loss scale and the parameters' copies belong to it. "
                "Fix: give one optimizer all parameters, in groups."
            )

    @property
    def masters(self) -> Mapping[nn.Parameter, nn.Parameter]:
        """The copies of half-precision parameters that are updated, by the model's."""
        return self._masters

    def __getattr__(self, name: str) -> Any:
        if "optimizer" not in self.__dict__:  # while it is copied
            raise AttributeError(name)
        inner = self.__dict__["optimizer"]
        if hasattr(inner, name):
            return getattr(inner, name)
        if name in _OF_SHARDS:
            raise AttributeError(f"{name!r} belongs to sharded data parallelism, which is not implemented.")
        hint = did_you_mean(name, (known for known in (*dir(type(self)), *dir(inner)) if not known.startswith("_")))
        raise AttributeError(
            f"smp.DistributedOptimizer has no attribute {name!r}, nor has the {type(inner).__name__} that it wraps."
            + hint
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As the wrapped optimizer's."""
        self.optimizer.add_param_group(param_group)

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was left out because gradients overflowed; accelerate asks."""
        return self.overflow

    @property
    def loss_scale(self) -> float:
        """The factor of losses now: 1 without `fp16`."""
        return self.scale.value

    # --- inside a step

    def backward(self, loss: torch.Tensor, update_master_grads: bool = False) -> None:
        """`model.backward(loss)`, which multiplies by the loss scale (AWS API before 1.10).

        update_master_grads: must be False: inside a step other microbatches have no gradients yet. Call the method of
            that name after the step. Raises StepUsageError otherwise.
        """
        if update_master_grads:
            raise StepUsageError(
                "optimizer.backward(update_master_grads=True) is called in a step, before all microbatches have "
                "gradients. Fix: leave it out, and call optimizer.update_master_grads() after the step."
            )
        state.the_model().backward(loss)

    # --- outside

    def zero_grad(self, set_to_none: bool | None = None, set_grads_to_None: bool | None = None) -> None:  # noqa: N803
        """As the wrapped optimizer's. set_grads_to_None: the name of `set_to_none` before AWS API 1.10."""
        _refuse_in_step("zero_grad")
        chosen = set_to_none if set_grads_to_None is None else set_grads_to_None
        self.optimizer.zero_grad(**({} if chosen is None else {"set_to_none": chosen}))
        if state.model is not None:
            state.model.had_backward = False
        self._unscaled = False  # GradScaler may have left out the step
        for parameter in self._masters:
            parameter.grad = None

    def update_master_grads(self) -> None:
        """Divide the gradients by the loss scale; if it is dynamic, find out whether any overflowed, on any rank."""
        _refuse_in_step("update_master_grads")
        if state.model is not None:
            state.model.require_averages()
            state.model.finish_averages()
            self._require_scaled_losses(state.model)
        self._make_masters()
        self._forget_old_gradients()
        self.overflow = False
        gradients = []
        for parameter in self._with_gradients(half=True):
            gradient = parameter.grad
            assert gradient is not None
            if parameter in self._masters:
                gradient = self._masters[parameter].grad = gradient.float()
            gradients.append(gradient)
        if self.scale.value != 1.0 and gradients:
            torch._foreach_div_(gradients, self.scale.value)
        # Not whether this stage has masters: another may have some, and would wait for this one.
        if self.scale.is_dynamic:
            found = torch.tensor([float(not math.isfinite(_largest(gradients)))], device=device_of(None))
            dist.all_reduce(found)
            self.overflow = bool(found.item())
        self._unscaled = True

    def _forget_old_gradients(self) -> None:
        """Those that copies have from a step before: scripts also reset the model's by hand, and not these."""
        for parameter, master in self._masters.items():
            if parameter.grad is None:
                master.grad = None

    def take_new_gradients(self) -> None:
        """A step has computed gradients: those that the last update was for are old, whoever has reset them."""
        self._unscaled = False

    def _require_scaled_losses(self, model: Any) -> None:
        if self.scale.value != 1.0 and not model.had_backward and self._with_gradients(half=True):
            raise StepUsageError(
                "Gradients were computed without model.backward, and would be divided by the loss scale "
                f"({self.scale.value:g}), which multiplied no loss. Fix: call model.backward(loss) in place of "
                "loss.backward()."
            )

    def clip_master_grads(self, max_norm: float, norm_type: float = 2.0) -> float:
        """Scale the gradients down to this norm over all stages; the norm that they had, -1 after an overflow."""
        if not self._unscaled:
            self.update_master_grads()
        if self.overflow:
            return -1.0
        return clip(self._with_gradients(), max_norm, norm_type)

    def step(self, closure: Any = None) -> Any:
        """Update the parameters of this stage; if gradients overflowed anywhere, nothing but the loss scale."""
        _refuse_in_step("step")
        if not self._unscaled:
            self.update_master_grads()
        self._unscaled = False
        self.scale.update(self.overflow)
        if self.overflow:
            return None
        result = self._step_shard(closure) if state.cfg.shard_optimizer_state else self.optimizer.step(closure)
        for parameter, master in self._masters.items():
            parameter.data.copy_(master.data)
        return result

    # --- what is kept

    def local_state_dict(self, gather_if_shard: bool = True) -> dict[str, Any]:
        """The wrapped optimizer's state of this stage's parameters, with what `fp16` and `bf16` have beside it.

        gather_if_shard: with `shard_optimizer_state`, of all replicas' shares; all ranks of RDP_GROUP call it then.
        """
        local = self.optimizer.state_dict()
        if state.cfg.shard_optimizer_state:
            local["state"] = self._owned(local["state"])
        if state.cfg.shard_optimizer_state and gather_if_shard:
            local["state"] = _union(state.objects.gather(local["state"], state.group("RDP_GROUP")))
        masters = set(self._masters.values())
        local["masters"] = {i: p.data for i, p in enumerate(self._parameters()) if p in masters}
        local["loss_scale"] = self.scale.state_dict()
        local["gathered"] = gather_if_shard or not state.cfg.shard_optimizer_state
        return local

    def state_dict(self, gather_to_rank0: bool = False) -> dict[str, Any]:
        """The wrapped optimizer's, of all stages; all ranks of a replica call it. See `DistributedModel.state_dict`."""
        return self.with_other_stages(self.local_state_dict(), gather_to_rank0)

    def save_optimizer_backcompat(
        self, cast_to_cpu: bool = True, gather_if_shard: bool = True, fp32_states_only: bool = False
    ) -> dict[str, Any]:
        """`local_state_dict`, for `load_optimizer_backcompat` (AWS API 1.10).

        Args:
            cast_to_cpu: Whether tensors are copied to the CPU.
            gather_if_shard: As `local_state_dict` has it. Save what is not gathered by `smp.save(..., v3=True)`.
            fp32_states_only: Leave out the wrapped optimizer's state: only single-precision copies and the loss scale.
        """
        local = self.local_state_dict(bool(gather_if_shard))
        if fp32_states_only:
            del local["state"]
        return tree_map(_to_cpu, local) if cast_to_cpu else local

    def load_optimizer_backcompat(self, state_dict: Mapping[str, Any], gather_if_shard: bool = False) -> None:
        """Load what `save_optimizer_backcompat` gave (AWS API 1.10).

        gather_if_shard: Whether every replica's share must be in it, as it is if it was saved with the same argument.
            Raises SMPRuntimeError if one is missing.
        """
        if gather_if_shard and not state_dict.get("gathered", True):
            raise SMPRuntimeError(
                "load_optimizer_backcompat: this optimizer state has the share of one replica only. Fix: save it with "
                "gather_if_shard=True, or load every replica's own with gather_if_shard=False."
            )
        self.load_state_dict(state_dict)

    def with_other_stages(self, local: dict[str, Any], gather_to_rank0: bool = False) -> dict[str, Any]:
        """`state_dict`, of what `local_state_dict` gave."""
        ranks, kept = state.group("PP_GROUP"), {key: local[key] for key in ("state", "masters")}
        if gather_to_rank0:
            if state.rank != ranks[0]:
                state.objects.send(kept, ranks[0], "state")
                return {}
            parts = [kept, *(state.objects.receive(rank, "state") for rank in ranks[1:])]
        else:
            parts = state.objects.gather(kept, ranks)
        return {**local, **{key: _union(part[key] for part in parts) for key in kept}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` or `local_state_dict` gave: at once if the model is placed, else as soon as it is."""
        saved = dict(state_dict)

        def load(*_: Any) -> None:
            if "loss_scale" in saved:
                self.scale.load_state_dict(saved["loss_scale"])
            self._make_masters()
            parameters = self._parameters()
            if "state" in saved:
                here = {i: s for i, s in saved["state"].items() if parameters[i].numel()}
                if state.cfg.shard_optimizer_state:
                    self._choose_owners()
                    here = self._owned(here)
                self.optimizer.load_state_dict({"state": here, "param_groups": saved["param_groups"]})
            self._load_masters(saved.get("masters", {}))
            saved.clear()  # the model may keep this function

        state.the_model().when_placed(load)

    def refresh_masters(self) -> None:
        """Take the copies anew from the parameters, which something else than `step` has set."""
        for parameter, master in self._masters.items():
            master.data.copy_(parameter.data)

    def reload_model_params(self, model: Any = None, optimizer: Any = None) -> None:
        """`refresh_masters` by its published name. It can be a hook of the model, which gives model and optimizer."""
        self.refresh_masters()

    # --- how

    def _make_masters(self) -> None:
        """Half-precision parameters are updated in copies of single precision, which the wrapped optimizer gets."""
        if not (state.cfg.fp16 or state.cfg.bf16):
            return
        for group in self.optimizer.param_groups:
            for place, parameter in enumerate(group["params"]):
                if parameter.dtype in (torch.float16, torch.bfloat16) and parameter.numel():
                    master = self._masters[parameter] = nn.Parameter(
                        parameter.detach().float(), parameter.requires_grad
                    )
                    group["params"][place] = master

    def _models(self) -> dict[int, nn.Parameter]:
        """The model's parameters, by the id of their copies."""
        return {id(master): parameter for parameter, master in self._masters.items()}

    def _load_masters(self, values: Mapping[int, torch.Tensor]) -> None:
        """Load copies, by the parameters' numbers. What does not round to its parameter is of another model's."""
        parameters, models = self._parameters(), self._models()
        for number, value in values.items():
            master = parameters[number]
            model = models.get(id(master))
            if model is not None and torch.equal(value.to(model), model.data):
                master.data.copy_(value)

    def updated(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """What has the gradients of these that the next `step` will apply: the model's, or unscaled ones of copies.

        All ranks call it where there is a loss scale.
        """
        given, copies = list(parameters), set(self._masters.values())
        if not self._unscaled and self.scale.value == 1.0 and copies.isdisjoint(given):
            return given  # `step` has yet to take them
        if not self._unscaled:
            self.update_master_grads()
        return [self._masters.get(parameter, parameter) for parameter in given]

    def _with_gradients(self, half: bool = False) -> list[nn.Parameter]:
        """The parameters here that have gradients; `half`: the model's own in place of their copies."""
        parameters = self._parameters()
        if half:
            models = self._models()
            parameters = [models.get(id(p), p) for p in parameters]
        return [p for p in parameters if p.grad is not None]

    def _parameters(self) -> list[nn.Parameter]:
        """Those of the wrapped optimizer, in the order of their numbers."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def _choose_owners(self) -> None:
        """Once for each parameter of this stage, trained yet or not: with an owner its moments would change hands."""
        for trained in (True, False):
            new = [p for p in self._parameters() if p.numel() and p.requires_grad is trained and p not in self._owners]
            self._owners.update(zip(new, share(new, len(state.group("RDP_GROUP")))))

    def _owned(self, states: Mapping[int, Any]) -> dict[int, Any]:
        """Of the states, by the parameters' numbers, those that this replica keeps."""
        parameters, mine = self._parameters(), state.group("RDP_GROUP").index(state.rank)
        return {i: value for i, value in states.items() if self._owners.get(parameters[i], mine) == mine}

    def _step_shard(self, closure: Any) -> Any:
        ranks, group = state.group("RDP_GROUP"), state.process_group("RDP_GROUP")
        self._choose_owners()
        parameters = self._with_gradients()
        owners = [self._owners[parameter] for parameter in parameters]
        mine = ranks.index(state.rank)
        held = {p: p.grad for p, owner in zip(parameters, owners) if owner != mine}
        for parameter in held:
            parameter.grad = None
        result = self.optimizer.step(closure)
        for parameter, gradient in held.items():
            parameter.grad = gradient
        for owner, rank in enumerate(ranks):
            owned = [parameter.data for parameter, other in zip(parameters, owners) if other == owner]
            broadcast_in_buckets(owned, group, rank)
        return result


def share(parameters: Iterable[torch.Tensor], replicas: int) -> list[int]:
    """The replica of each parameter: the largest first, each to who has least so far."""
    sizes = [parameter.numel() for parameter in parameters]
    owners, loads = [0] * len(sizes), [0] * replicas
    for place in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        owners[place] = loads.index(min(loads))
        loads[owners[place]] += sizes[place]
    return owners


def _refuse_in_step(name: str) -> None:
    """Raises StepUsageError inside a step, whose body runs on the first stage alone, once for each microbatch."""
    if current() is not None:
        raise StepUsageError(
            f"optimizer.{name}() is called inside a step: the other stages would not call it. Fix: call it after the "
            "function under @smp.step, on all ranks."
        )


def updated(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """What has the gradients of these that the next step will apply, averaged and unscaled: for clipping."""
    if state.model is not None:
        state.model.finish_averages()
    return list(parameters) if state.optimizer is None else state.optimizer.updated(parameters)


def models(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """These, with the model's parameters in place of their copies."""
    known = {} if state.optimizer is None else {copy: own for own, copy in state.optimizer.masters.items()}
    return [known.get(parameter, parameter) for parameter in parameters]


def clip(parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0) -> float:
    """Scale gradients down so that their norm over all stages is at most `max_norm`; the norm that they had."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    infinite = norm_type == float("inf")
    if infinite:
        part = _largest(gradients)
    else:
        part = sum(float((norms**norm_type).sum()) for norms in _norms(gradients, norm_type))
    parts = state.objects.gather(part, state.group("PP_GROUP"))
    total = _maximum(parts) if infinite else sum(parts) ** (1 / norm_type)
    if total > max_norm and gradients:
        torch._foreach_mul_(gradients, max_norm / (total + 1e-6))
    return float(total)


def _largest(gradients: Sequence[torch.Tensor]) -> float:
    """The largest absolute value; infinite or not a number, if one of them is."""
    return _maximum(float(norms.max()) for norms in _norms(gradients, float("inf")))


def _maximum(values: Iterable[float]) -> float:
    """As torch's: not a number, if one is none, wherever it stands."""
    found = list(values)
    return next((value for value in found if math.isnan(value)), max(found, default=0.0))


def _norms(gradients: Sequence[torch.Tensor], norm_type: float) -> Iterator[torch.Tensor]:
    """Yield the gradients' norms, in a tensor for each device: whoever reads it waits for that device once."""
    found: dict[torch.device, list[torch.Tensor]] = {}
    for gradient in gradients:
        if gradient.numel():
            wide = torch.promote_types(gradient.dtype, torch.float32)  # a norm in float16 overflows
            found.setdefault(gradient.device, []).append(torch.linalg.vector_norm(gradient, norm_type, dtype=wide))
    for norms in found.values():
        yield torch.stack([norm.double() for norm in norms])


def _to_cpu(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value


def _union(parts: Iterable[Mapping[int, Any]]) -> dict[int, Any]:
    found = {key: value for part in parts for key, value in part.items()}
    return {key: found[key] for key in sorted(found)}
