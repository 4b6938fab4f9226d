"""`smp.DistributedModel`: a model with its modules on several stages.

It runs calls and backward, places the modules, and has hooks. `model_parts` has its parameters and state dicts.
"""

from __future__ import annotations

import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from smdistributed.core.options import only_known, warn_without_effect
from smdistributed.modelparallel.backend.allocator import SHARD_BYTES, STAGE_BYTES, map_large_blocks
from smdistributed.modelparallel.backend.exceptions import (
    SMPConfigError,
    SMPRuntimeError,
    SMPUnsupportedError,
    StepUsageError,
)
from smdistributed.modelparallel.torch.nn.huggingface import translations
from smdistributed.modelparallel.torch.nn.replacement import distribute
from smdistributed.modelparallel.torch.nn.tensor_group import seed_of_first, tensor_group
from smdistributed.modelparallel.torch.pipeline.module_manager import ModuleManager
from smdistributed.modelparallel.torch.pipeline.module_routing import route_calls
from smdistributed.modelparallel.torch.pipeline.offloading import offload_activations
from smdistributed.modelparallel.torch.pipeline.tasks import current_task, move_all_here
from smdistributed.modelparallel.torch.plan.construction import dtype_of
from smdistributed.modelparallel.torch.plan.manual_partition import manual_stages
from smdistributed.modelparallel.torch.script import clipping
from smdistributed.modelparallel.torch.script.buckets import Replicas, broadcast_in_buckets, by_replicas
from smdistributed.modelparallel.torch.script.gradients import Reducer, StepGradients
from smdistributed.modelparallel.torch.script.half_precision import convert, to_half, to_single
from smdistributed.modelparallel.torch.script.model_parts import ModelParts
from smdistributed.modelparallel.torch.script.optimizer_shards import OptimizerShards
from smdistributed.modelparallel.torch.script.placement import choose_stages, materialize_local_modules, move_to_gpu
from smdistributed.modelparallel.torch.script.sharded_gradients import ShardAverages
from smdistributed.modelparallel.torch.script.sharding import Shards
from smdistributed.modelparallel.torch.script.state import TorchState, state
from smdistributed.modelparallel.torch.script.uneven_inputs import UnevenInputs, join, require_joinable

_Hook = Callable[["DistributedModel", Any], Any]


class DistributedModel(ModelParts):
    """Wraps the model of a script, one in each (AWS API). It is cut and placed at the first call inside a step.

    Wrapping the same model again returns the existing wrapper. With one partition the model is placed at once, and may
    be called outside a step. Then call this wrapper's `backward`, not the loss's, so that replicas average gradients.

    With `fp16` or `bf16`, parameters and buffers are cast to half precision at once. Positional arguments of a call are
    cast to it, and outputs to float32; tensors are found inside tuples and lists only.

    Args:
        module: The model.
        trace_device: No effect, and a warning if it is not the default: the model is traced on the meta device.
        trace_execution_times: No effect, and a warning if it is true.
        overlapping_allreduce: With `ddp`, whether gradients are averaged while later ones are still computed.
        backward_passes_per_step: Average gradients over the replicas after this many steps.
        average_grads_across_microbatches: Whether gradients are means over the microbatches; otherwise sums.
        bucket_cap_mb: How much is averaged at once, in MiB.
        trace_memory_usage: No effect, and a warning if it is true.
        broadcast_buffers: With `ddp`, whether the first replica's buffers are copied to the others before each step.
        gradient_as_bucket_view: No effect, and a warning if it is true.

    Raises:
        StepUsageError: Before `smp.init`.
        SMPRuntimeError: If the script has wrapped another model before.
        SMPConfigError: If `trace_device` is not 'gpu' or 'cpu'.
    """

    def __new__(cls, module: nn.Module, *_: Any, **__: Any) -> DistributedModel:
        """Returns the existing wrapper of this module, if there is one: transformers' Trainer wraps it again.

        Other arguments then have no effect.
        """
        known = state.model
        if isinstance(known, DistributedModel) and (known.module is module or known._given() is module):
            return known
        return super().__new__(cls)

    @only_known
    def __init__(
        self,
        module: nn.Module,
        trace_device: str = "gpu",
        trace_execution_times: bool = False,
        overlapping_allreduce: bool = True,
        backward_passes_per_step: int = 1,
        average_grads_across_microbatches: bool = True,
        bucket_cap_mb: int = 25,
        trace_memory_usage: bool = False,
        broadcast_buffers: bool = True,
        gradient_as_bucket_view: bool = False,
    ) -> None:
        state.require()
        if state.model is self:
            return
        super().__init__()
        if state.model is not None:
            raise SMPRuntimeError(
                "There is an smp.DistributedModel already: a script has one. Fix: wrap a module that contains both."
            )
        _warn_of_tracing(trace_device, trace_execution_times, trace_memory_usage, gradient_as_bucket_view)
        self._state = state
        self._given = weakref.ref(module)
        module = distribute(module)
        self._dtype = dtype_of(state.cfg)
        if self._dtype is not None:
            convert(module, self._dtype)
        self.module = module
        _name_itself(module)
        self.manager = ModuleManager(module, lambda: self._state.stage)
        self.manager.translate_functions = list(translations(module))
        self.partitioned = False
        self.weights: list[float] = []
        """The share of each microbatch of the running step in its batch."""
        self.gradients = StepGradients(self._placed_parameters, self._must_have_mean_gradients)
        self._average = average_grads_across_microbatches
        self._broadcast_buffers = broadcast_buffers
        self._reducer_options = (overlapping_allreduce, bucket_cap_mb << 20, backward_passes_per_step)
        self._placement_hooks: OrderedDict[int, Callable[..., Any]] = OrderedDict()
        self._step_hooks: OrderedDict[int, Callable[..., Any]] = OrderedDict()
        self._to_load = None
        self._resumed_stages: dict[str, int] | None = None
        self._replaced: dict[nn.Parameter, nn.Parameter] = {}
        self._comm_hook: Callable[[Any], Any] | None = None
        self.optimizer_shards: OptimizerShards | None = None
        """With `shard_optimizer_state`, the owners of the placed model's parameters."""
        self.shards: Shards | None = None
        """With `sharded_data_parallel_degree`, the shards of the placed model."""
        self._is_whole = False
        self._uneven: UnevenInputs | None = None
        state.model = self
        if state.cfg.partitions == 1:
            self.apply_partition(choose_stages(state, self.manager, None, (), {}))

    # --- inside a step

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model (AWS API). Tensors on the CPU are moved to this rank's GPU, if it has one.

        The first call decides which stage has which module.

        Returns:
            The output of the wrapped model.

        Raises:
            StepUsageError: Outside a step, if there are several partitions.
            SMPConfigError: In the first call, if the model cannot be cut as configured.
        """
        if current_task() is None:
            self._begin_outside()
        if not self.partitioned:
            if self._dtype is not None:
                args = to_half(args, self._dtype)
            stages = choose_stages(self._state, self.manager, self._resumed_stages, args, kwargs)
            self._state.stage.partition(stages)
            self.apply_partition(stages)
        args, kwargs = move_all_here((args, kwargs))
        if self._dtype is None:
            return self.module(*args, **kwargs)
        return to_single(self.module(*to_half(args, self._dtype), **kwargs), self._dtype)

    @property
    def shard_ranks(self) -> tuple[int, ...]:
        """The ranks that hold one replica together, with `sharded_data_parallel_degree`; else none."""
        return self.shards.ranks if self.shards else ()

    def backward(self, tensors: Any, grad_tensors: Any = None) -> None:
        """Runs backward from the losses of this microbatch (AWS API).

        If gradients are means, it multiplies them by the microbatch's share of the batch. With `fp16`, it multiplies by
        the loss scale. Outside a step, it also averages gradients over replicas, and calls the hooks of the step.

        Args:
            tensors: A loss, or a list or tuple of losses.
            grad_tensors: The gradient of each; None: 1.

        Raises:
            StepUsageError: Outside a step, if there are several partitions.
        """
        task, optimizer = current_task(), self._state.optimizer
        if task is None:
            self._require_one_partition("model.backward is called")
        tensors = list(tensors) if isinstance(tensors, (list, tuple)) else [tensors]
        given = list(grad_tensors) if isinstance(grad_tensors, (list, tuple)) else [grad_tensors] * len(tensors)
        weight = self.weights[task.microbatch] if task and self._average else 1.0
        scale = optimizer.master_weights.scale.value if optimizer else 1.0
        gradients = [
            (torch.ones_like(tensor) if gradient is None else gradient) * (weight * scale)
            for tensor, gradient in zip(tensors, given)
        ]
        if task:
            self._state.stage.before_backward()
        self.gradients.before_backward()
        torch.autograd.backward(tensors, gradients)
        if task is None:
            self.gradients.was_called_outside = False
            self.after_step(True)

    def train(self, mode: bool = True) -> DistributedModel:
        """Sets the training mode on this rank: see torch.nn.Module.train. Call it on all ranks.

        Raises:
            StepUsageError: Inside a step with several partitions, if it changes the mode.
        """
        if current_task() is not None and self._state.cfg.partitions > 1 and mode is not self.training:
            raise StepUsageError(
                f"model.{'train' if mode else 'eval'}() is called inside a step: the other stages would not call it. "
                "Fix: call it before the function under @smp.step, on all ranks."
            )
        return super().train(mode)

    # --- outside a step, with one partition

    def _begin_outside(self) -> None:
        """Calls with gradients up to the next `backward` are one step. Raises StepUsageError with several stages."""
        self._require_one_partition("The model is called")
        self.before_step(is_new=not self.gradients.was_called_outside)
        self.gradients.was_called_outside |= torch.is_grad_enabled()

    def _require_one_partition(self, what: str) -> None:
        """Raises StepUsageError if there are several partitions. `what`: the begin of its message."""
        if self._state.cfg.partitions > 1:
            raise StepUsageError(f"{what} outside a step. Fix: call it in a function under @smp.step.")

    # --- around a step

    def before_step(self, is_new: bool = True) -> None:
        """Copies buffers to the replicas, and frees what `cpu` has gathered. All ranks call it.

        `is_new`: whether gradients from before belong to another step.
        """
        if not self.partitioned:
            self.manager.refresh_modules()
        if self._state.cfg.prescaled_batch and len(self._state.group("TP_GROUP")) > 1:
            self._state.stage.common_seed = seed_of_first()  # dropout of the same rows must be the same
        if self._is_whole:
            self._is_whole = False
            self.manager.release_remote_tensors()
            move_to_gpu(self.local_modules())
        if self.partitioned and self._broadcast_buffers and not self._uneven:
            self._copy_from_first_replica(self.local_buffers())
        if is_new:
            self.gradients.begin()

    def after_step(self, had_backward: bool) -> None:
        """Averages gradients if the step trained, and calls and removes its hooks. All ranks call it.

        Raises StepUsageError if gradients were not computed by `model.backward`.
        """
        optimizer = self._state.optimizer
        if had_backward and optimizer is not None:
            optimizer.master_weights.note_new_gradients()
        if self.shards:
            self.shards.release()
        if had_backward and self._uneven:
            self._uneven.notify()
        self.gradients.end(had_backward)
        for hook in list(self._step_hooks.values()):
            hook(self, optimizer)
        self._step_hooks.clear()

    def _tune_allocator(self) -> None:
        cfg = self._state.cfg
        if cfg.partitions > 1 or cfg.sharded_data_parallel_degree > 1:
            map_large_blocks(SHARD_BYTES if cfg.sharded_data_parallel_degree > 1 else STAGE_BYTES)

    def apply_partition(self, stages: Mapping[str, int]) -> None:
        """Places the modules, loads a state dict that waits, and calls the placement hooks. All ranks call it.

        Replicas take the values of the first one. It patches nn.Module.__call__ and torch's clipping functions, and
        replaces parameters that were made without memory. With several stages or shards, it tunes the C allocator.
        """
        cfg = self._state.cfg
        self._tune_allocator()
        self.manager.assign(stages)
        route_calls(self.manager)
        clipping.install()
        offload_activations(cfg.activation_loading_horizon if cfg.offload_activations else 0)
        self.partitioned = True
        if cfg.sharded_data_parallel_degree > 1:
            self.shards = Shards(self._state, self.manager)
            self.shards.split(self._make_unit)
            self._replaced = self.shards.parameters
        else:
            self._replaced = materialize_local_modules(self.manager)
            move_to_gpu(self.local_modules())
        if cfg.shard_optimizer_state:
            ranks, group = self._state.group("RDP_GROUP"), self._state.process_group("RDP_GROUP")
            self.optimizer_shards = OptimizerShards(ranks, self._state.rank, group, self.local_parameters())
        if self._state.optimizer is not None:
            self.replace_parameters(self._state.optimizer.optimizer)
        load, self._to_load = self._to_load, None
        if load:
            load()
        if self.shards and tensor_group().size > 1:
            bucket_bytes = self._reducer_options[1]
            self.gradients.reducer = ShardAverages(list(self.local_parameters()), tensor_group(), bucket_bytes)
        elif len(self._state.group("DP_GROUP")) > 1 and self.shards is None:
            parameters = list(self.local_named_parameters())
            reducer = Reducer(parameters, self._replicas(), *self._reducer_options, self.optimizer_shards)
            reducer.hook, self.gradients.reducer = self._comm_hook, reducer
            self._copy_from_first_replica((*self.local_parameters(), *self.local_buffers()))
            reducer.begin()
        for hook in list(self._placement_hooks.values()):
            hook(self, self._state.optimizer)
        self._placement_hooks.clear()  # they may hold what they have loaded

    def _make_unit(self, modules: Collection[nn.Module]) -> dict[nn.Parameter, nn.Parameter]:
        """Makes the tensors of modules, with the values of the first replica. See `materialize_local_modules`."""
        made = materialize_local_modules(self.manager, modules)
        move_to_gpu(modules)
        tensors = (value for module in modules for value in (*module._parameters.values(), *module._buffers.values()))
        self._copy_from_first_replica({id(value): value for value in tensors if value is not None}.values())
        return made

    def _copy_from_first_replica(self, tensors: Iterable[torch.Tensor]) -> None:
        """Copies tensors of the first replica to the others. All replicas call it."""
        for replicas, its in by_replicas(tensors, self._replicas()):
            if len(replicas.ranks) > 1:
                broadcast_in_buckets(its, replicas.group, replicas.ranks[0])

    def _replicas(self) -> tuple[Replicas, Replicas]:
        """The replicas of whole parameters, and of shares. Each has the batches of all ranks that share tensors."""
        state, whole, shares = self._state, self._state.group("DP_GROUP"), self._state.group("RDP_GROUP")
        batches = len(shares) if state.cfg.prescaled_batch else len(whole)
        return (
            Replicas(state.process_group("DP_GROUP"), whole, len(whole)),
            Replicas(state.process_group("RDP_GROUP"), shares, batches),
        )

    def adopt_stages(self, stages: Mapping[str, int]) -> bool:
        """Keeps the stages of a checkpoint for the first call, if nothing else is decided. Places nothing now.

        Returns whether the modules are, or will be, on these stages. Other names of modules give False.
        """
        if set(stages) != set(self.manager.modules):
            return False
        if self.partitioned:
            return self.manager.stages == stages
        cfg = self._state.cfg
        if not cfg.auto_partition:
            return manual_stages(self.manager, cfg.default_partition, cfg.partitions) == stages
        self._resumed_stages = dict(stages)
        return True

    def replace_parameters(self, optimizer: torch.optim.Optimizer) -> None:
        """Gives an optimizer the parameters that were made in place of those constructed without memory."""
        if self._replaced:
            for group in optimizer.param_groups:
                group["params"] = [self._replaced.get(parameter, parameter) for parameter in group["params"]]

    def _placed_parameters(self) -> Iterator[nn.Parameter]:
        """Yields the parameters of this stage; none before the model is placed."""
        return self.local_parameters() if self.partitioned else iter(())

    def _must_have_mean_gradients(self) -> bool:
        return self._average and self.partitioned and self._state.cfg.microbatches > 1

    # --- gradients

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> float:
        """Scales gradients down so that their norm over all stages is at most `max_norm`.

        All ranks of a replica call it, after the step. torch.nn.utils.clip_grad_norm_ of all parameters does the same.

        Args:
            max_norm: The largest norm that is allowed.
            norm_type: The p of the p-norm; inf for the largest absolute value.

        Returns:
            The norm before clipping.
        """
        parameters = clipping.updated_parameters(self._state, self.local_parameters())
        return clipping.clip_over_model(self._state, parameters, max_norm, norm_type)

    @contextmanager
    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Iterator[None]:
        """Lets replicas have fewer batches than others inside `with` (AWS API 1.2), as DistributedDataParallel.join.

        A replica without batches takes part in averages, with gradients of 0. At the end, all have the parameters and
        buffers of a replica that had the most batches; the optimizer's state stays. Inside, buffers of replicas differ.

        Args:
            divide_by_initial_world_size: Whether averages count the replicas without batches. Must be true.
            enable: False: do nothing.
            throw_on_early_termination: Whether all replicas raise RuntimeError when the first has no batches left.

        Raises:
            SMPUnsupportedError: With pipeline, tensor or sharded data parallelism, `shard_optimizer_state` or `fp16`.
        """
        require_joinable(self._state)
        if not divide_by_initial_world_size:
            raise SMPUnsupportedError("divide_by_initial_world_size is False. Allowed: True. Fix: leave it out.")
        reducer = self.gradients.reducer
        if not isinstance(reducer, Reducer) or not enable:
            yield
            return
        tensors = [*self.local_parameters(), *self.local_buffers()]
        self._uneven = UnevenInputs(self._state, reducer, tensors)
        try:
            with join(self._uneven, reducer, throw_on_early_termination):
                yield
        finally:
            self._uneven = None

    def register_comm_hook(self, state: Any, hook: Callable[[Any, Any], Any]) -> None:
        """Has a hook average gradients over the replicas, one bucket at a time (AWS API 1.3).

        torch's hooks work (torch.distributed.algorithms.ddp_comm_hooks). All ranks call it, before the first step.

        Args:
            state: The hook's first argument: for torch's a process group, or a state with one. With several partitions
                it must be `smp.get_dp_process_group()`, or have that.
            hook: Called as `hook(state, bucket)`. `bucket` has the methods of torch.distributed.GradBucket, and the
                result is a torch.futures.Future of the bucket's averages.

        Raises:
            SMPConfigError: With several partitions, if `state` has no process group: torch's hooks take all ranks then.
            SMPRuntimeError: If there is a hook already.
            SMPUnsupportedError: With `sharded_data_parallel_degree` or `tensor_parallel_degree` above 1.
        """
        for name in ("sharded_data_parallel_degree", "tensor_parallel_degree"):
            if getattr(self._state.cfg, name) > 1:
                raise SMPUnsupportedError(
                    f"model.register_comm_hook() is called, and {name!r} is above 1: gradients of split parameters are "
                    "reduced in another way. Fix: leave one of them out."
                )
        if self._comm_hook is not None:
            raise SMPRuntimeError("The model has a communication hook already. Fix: register one.")
        if self._state.cfg.partitions > 1 and getattr(state, "process_group", state) is None:
            raise SMPConfigError(
                "model.register_comm_hook() has no process group, so that torch's hooks would average over all stages. "
                "Fix: pass smp.get_dp_process_group() as the state, or to the state."
            )
        self._comm_hook = functools.partial(hook, state)
        if isinstance(self.gradients.reducer, Reducer):
            self.gradients.reducer.hook = self._comm_hook

    # --- hooks

    def when_placed(self, action: Callable[..., Any]) -> None:
        """Calls `action()` at once if the model is placed; otherwise `action(model, optimizer)` as soon as it is."""
        if self.partitioned:
            action()
        else:
            _register(self._placement_hooks, action)

    def register_post_partition_hook(self, hook: _Hook) -> RemovableHandle:
        """Registers a hook that is called when the model is placed; at once if it is.

        Args:
            hook: Called as `hook(model, optimizer)`.

        Returns:
            A handle; its `remove()` removes the hook.
        """
        if self.partitioned:
            hook(self, self._state.optimizer)
        return _register(self._placement_hooks, hook)

    def register_post_step_hook(self, hook: _Hook) -> RemovableHandle:
        """Registers a hook that is called once, when the current or the next step has ended.

        transformers' Trainer loads the optimizer's state there, and never removes the hook.

        Args:
            hook: Called as `hook(model, optimizer)`.

        Returns:
            A handle; its `remove()` removes the hook.
        """
        return _register(self._step_hooks, hook)


def script_model(state: TorchState) -> DistributedModel:
    """The model that the script has wrapped. Raises StepUsageError if there is none."""
    if not isinstance(state.model, DistributedModel):
        raise StepUsageError("There is no smp.DistributedModel yet. Fix: wrap the model before the first step.")
    return state.model


def _name_itself(module: nn.Module) -> None:
    """Gives a module the attribute `module`, which is the module itself; if it has one, the module in there.

    AWS's scripts of before October 2022 use `model.module.module`, and one more `.module` for a wrapper of their own.
    """
    while isinstance(inner := getattr(module, "module", None), nn.Module) and inner is not module:
        module = inner
    if not hasattr(module, "module"):
        module.__dict__["module"] = module  # an entry of `__dict__` is not a child


def _warn_of_tracing(device: str, times: bool, memory: bool, bucket_view: bool) -> None:
    if device not in ("gpu", "cpu"):
        raise SMPConfigError(f"trace_device is {device!r}. Allowed: 'gpu' or 'cpu'. Fix: leave it out.")
    traced = "the model is traced on the meta device, without computing"
    if device != "gpu":
        warn_without_effect("trace_device of smp.DistributedModel", traced)
    if times or memory:
        warn_without_effect("trace_execution_times and trace_memory_usage of smp.DistributedModel", traced)
    if bucket_view:
        warn_without_effect("gradient_as_bucket_view of smp.DistributedModel", "gradients have memory of their own")


def _register(hooks: OrderedDict[int, Callable[..., Any]], hook: Callable[..., Any]) -> RemovableHandle:
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle
