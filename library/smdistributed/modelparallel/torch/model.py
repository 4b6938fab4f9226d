"""`smp.DistributedModel`: a model whose modules are on several stages."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from smdistributed.core.options import only_known, warn_without_effect
from smdistributed.modelparallel.backend.exceptions import (
    SMPConfigError,
    SMPRuntimeError,
    SMPUnsupportedError,
    StepUsageError,
)
from smdistributed.modelparallel.torch import devices
from smdistributed.modelparallel.torch.auto_partition import auto_partition
from smdistributed.modelparallel.torch.construction import materialize_module
from smdistributed.modelparallel.torch.half_precision import convert, dtype_of, lower, raised
from smdistributed.modelparallel.torch.module_manager import ModuleManager, has_partition, manual_stages
from smdistributed.modelparallel.torch.optimizer import clip, updated
from smdistributed.modelparallel.torch.patches import clipping
from smdistributed.modelparallel.torch.reducer import Reducer
from smdistributed.modelparallel.torch.state_mod import state
from smdistributed.modelparallel.torch.work import current

_UNAVERAGED = (
    "Gradients were computed without model.backward, so that replicas would not average them: call "
    "model.backward(loss) in place of loss.backward()."
)
_SUMMED = (
    "Gradients were computed without model.backward, so that they are sums over the microbatches in place of means: "
    "call model.backward(loss) in place of loss.backward()."
)
_PARTIAL = "_smp_is_partial"
"""A key of state dicts by which AWS's library tells names of its own modules from Hugging Face's."""
_Hook = Callable[["DistributedModel", Any], Any]


class DistributedModel(nn.Module):
    """Wraps the model of a script, one in each (AWS API). It is cut and placed at the first call inside a step.

    overlapping_allreduce: with `ddp`, average gradients over the replicas while later ones are still computed.
    backward_passes_per_step: average them at every so many steps.
    average_grads_across_microbatches: whether gradients are the mean over the microbatches; else their sum.
    bucket_cap_mb: the size of what is averaged at once, in MiB.
    broadcast_buffers: with `ddp`, copy the first replica's buffers to the others before each step.

    Wrapping the same model again gives the wrapper that there is. With one partition it is placed at once, and may be
    called outside a step; call `backward` of it then, not the loss's, so that replicas average gradients.

    With `fp16` or `bf16`, parameters and buffers are cast to half precision at once. Positional arguments of a call
    are cast to it, and outputs to float32, through tuples and lists only.

    trace_device, trace_execution_times, trace_memory_usage and gradient_as_bucket_view have no effect, and warn if they
    are not the default: the model is traced on the meta device, which needs neither a device nor memory.
    """

    def __new__(cls, module: nn.Module, *_: Any, **__: Any) -> DistributedModel:
        """The wrapper that there is, if there is one of this module: transformers' Trainer wraps again to evaluate."""
        if state.model is not None and state.model.module is module:
            return state.model
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
            raise SMPRuntimeError("There is an smp.DistributedModel already: a script has one.")
        _warn_of_tracing(trace_device, trace_execution_times, trace_memory_usage, gradient_as_bucket_view)
        self._dtype = dtype_of(state.cfg)
        if self._dtype is not None:
            convert(module, self._dtype)
        self.module = module
        self.manager = ModuleManager(module, lambda: state.stage)
        self.partitioned = False
        self.weights: list[float] = []
        """The share of each microbatch of the running step in its batch."""
        self._average = average_grads_across_microbatches
        self._broadcast_buffers = broadcast_buffers
        self._reducing = (overlapping_allreduce, bucket_cap_mb << 20, backward_passes_per_step)
        self._reducer: Reducer | None = None
        self._after_partition: OrderedDict[int, Callable[..., Any]] = OrderedDict()
        self._after_step: OrderedDict[int, Callable[..., Any]] = OrderedDict()
        self._to_load: tuple[Mapping[str, Any], bool] | None = None
        self._resumed: dict[str, int] | None = None
        self._made: dict[nn.Parameter, nn.Parameter] = {}
        self._is_whole = self._was_called_outside = self._has_called_backward = False
        self._graded: set[int] = set()
        self.had_backward = False
        """Whether losses were multiplied by the loss scale since the optimizer's `zero_grad`."""
        state.model = self
        if state.cfg.partitions == 1:
            self.apply_partition(self._choose_stages((), {}))

    # --- inside a step

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model, with tensors that are on the CPU moved to this rank's GPU, where it has one (AWS API).

        Raises StepUsageError outside a step, if there are several partitions.
        """
        if current() is None:
            self._begin_outside()
        if not self.partitioned:
            if self._dtype is not None:
                args = lower(args, self._dtype)
            stages = self._choose_stages(args, kwargs)
            state.stage.partition(stages)
            self.apply_partition(stages)
        args, kwargs = devices.move_all_here((args, kwargs))
        if self._dtype is None:
            return self.module(*args, **kwargs)
        return raised(self.module(*lower(args, self._dtype), **kwargs), self._dtype)

    def backward(self, tensors: Any, grad_tensors: Any = None) -> None:
        """Run backward from this microbatch's loss, or losses (AWS API). With `fp16` it multiplies by the loss scale.

        Raises StepUsageError outside a step, if there are several partitions.
        """
        work = current()
        if work is None:
            self._require_one_partition("model.backward is called")
        tensors = list(tensors) if isinstance(tensors, (list, tuple)) else [tensors]
        given = list(grad_tensors) if isinstance(grad_tensors, (list, tuple)) else [grad_tensors] * len(tensors)
        weight = self.weights[work.microbatch] if work and self._average else 1.0
        scale = state.optimizer.loss_scale if state.optimizer else 1.0
        gradients = [
            (torch.ones_like(tensor) if gradient is None else gradient) * (weight * scale)
            for tensor, gradient in zip(tensors, given)
        ]
        if work:
            state.stage.before_backward()
        torch.autograd.backward(tensors, gradients)
        if work is None:
            self._was_called_outside = False
            self.after_step(True)

    def train(self, mode: bool = True) -> DistributedModel:
        """As of any module, on all ranks. Raises StepUsageError in a step that spans stages, if it changes anything."""
        if current() is not None and state.cfg.partitions > 1 and mode is not self.training:
            raise StepUsageError(
                f"model.{'train' if mode else 'eval'}() is called inside a step: the other stages would not call it. "
                "Fix: call it before the function under @smp.step, on all ranks."
            )
        return super().train(mode)

    # --- outside a step, with one partition

    def _begin_outside(self) -> None:
        self._require_one_partition("The model is called")
        self.before_step(begins=not self._was_called_outside)
        self._was_called_outside |= torch.is_grad_enabled()

    def _require_one_partition(self, what: str) -> None:
        if state.cfg.partitions > 1:
            raise StepUsageError(f"{what} outside a step: call it in a function under @smp.step.")

    def require_averages(self) -> None:
        """Raises StepUsageError when replicas have computed gradients outside a step that they have not averaged."""
        if self._reducer and self._was_called_outside and self._reducer.saw_gradients:
            raise StepUsageError(_UNAVERAGED)

    def finish_averages(self) -> None:
        """Average over the replicas what `backward_passes_per_step` has left to later steps; all replicas call it."""
        if self._reducer:
            self._reducer.finish()

    # --- around a step

    def before_step(self, begins: bool = True) -> None:
        """Called on all ranks when a step begins. begins: whether gradients before it belong to another."""
        if not self.partitioned:
            self.manager.look_again()
        if self._is_whole:
            self._is_whole = False
            self.manager.give_up()
            self._move()
        if self._reducer and self._broadcast_buffers:
            self._reducer.broadcast(buffer for _, buffer in self.local_named_buffers())
        if begins:
            self._was_called_outside = False
            self._note_gradients()
        if self._reducer and begins:
            self._reducer.begin()

    def _note_gradients(self) -> None:
        """Keep which parameters have gradients before a step, until one has called `backward`: then scripts do."""
        if not self._has_called_backward and self.partitioned:
            self._graded = {id(p) for p in self.local_parameters() if p.grad is not None}

    def _require_means(self) -> None:
        """Raises StepUsageError when a step without `backward` has left gradients of several microbatches."""
        if self._has_called_backward or not (self._average and self.partitioned and state.cfg.microbatches > 1):
            return
        if any(p.grad is not None and id(p) not in self._graded for p in self.local_parameters()):
            raise StepUsageError(_SUMMED)

    def after_step(self, had_backward: bool) -> None:
        """Called on all ranks when a step has ended. had_backward: it trained; an evaluation leaves gradients alone."""
        self.had_backward |= had_backward
        self._has_called_backward |= had_backward
        if had_backward and state.optimizer is not None:
            state.optimizer.take_new_gradients()
        if self._reducer and had_backward:
            self._reducer.end()
        elif self._reducer and self._reducer.saw_gradients:
            raise StepUsageError(_UNAVERAGED)
        self._require_means()
        for hook in list(self._after_step.values()):
            hook(self, state.optimizer)
        self._after_step.clear()

    def apply_partition(self, stages: Mapping[str, int]) -> None:
        """Place the modules: every rank keeps the parameters of its own."""
        self.manager.assign(stages)
        clipping.install()
        self.partitioned = True
        self._materialize()
        self._move()
        if self._to_load:
            self.load_state_dict(*self._to_load)
            self._to_load = None
        if len(state.group("DP_GROUP")) > 1:
            self._reducer = Reducer(
                list(self.local_named_parameters()),
                state.process_group("DP_GROUP"),
                state.group("DP_GROUP"),
                *self._reducing,
            )
            self._reducer.broadcast(tensor for tensor in (*self.local_parameters(), *self.local_buffers()))
            self._reducer.begin()
        for hook in list(self._after_partition.values()):
            hook(self, state.optimizer)
        self._after_partition.clear()  # they may hold what they have loaded

    def fix_stages(self, stages: Mapping[str, int]) -> bool:
        """Place the modules as a checkpoint says, if nothing else is decided. Whether they are, or will be, so."""
        if set(stages) != set(self.manager.modules):
            return False
        if self.partitioned:
            return self.manager.stages == stages
        if not state.cfg.auto_partition:
            return manual_stages(self.manager, state.cfg.default_partition, state.cfg.partitions) == stages
        self._resumed = dict(stages)
        return True

    def _choose_stages(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, int]:
        if state.cfg.auto_partition and any(has_partition(module) for module in self.manager.modules.values()):
            warn_without_effect("smp.partition and smp.set_partition", "'auto_partition' of mp_parameters is true")
        if state.cfg.auto_partition and state.cfg.partitions == 1:
            return dict.fromkeys(self.manager.modules, 0)
        if state.cfg.auto_partition and self._resumed is not None:
            return self._resumed
        if state.cfg.auto_partition:
            state.is_tracing = True
            try:
                found = auto_partition(self.module, state.cfg, args, kwargs)
            finally:
                state.is_tracing = False
            if state.rank == 0:
                print(found, file=sys.stderr)
            return found.stages
        return manual_stages(self.manager, state.cfg.default_partition, state.cfg.partitions)

    def _materialize(self) -> None:
        """Make what was constructed without memory, and have the optimizer know it."""
        replaced: dict[nn.Parameter, nn.Parameter] = {}
        for name, module in self.manager.local_modules():
            for key, parameter in module._parameters.items():
                if parameter in replaced:  # shared
                    module._parameters[key] = replaced[parameter]
            replaced.update(materialize_module(module, name))
        self._made = replaced
        if state.optimizer is not None:
            self.give_made_parameters(state.optimizer)

    def give_made_parameters(self, optimizer: Any) -> None:
        """Have an optimizer know the parameters that were made in place of those constructed without memory."""
        if self._made:
            for group in optimizer.param_groups:
                group["params"] = [self._made.get(parameter, parameter) for parameter in group["params"]]

    def _move(self) -> None:
        if torch.cuda.is_available():
            for _, parameter in self.local_named_parameters():
                parameter.data = parameter.data.cuda()
            for _, module in self.manager.local_modules():
                for key, buffer in module._buffers.items():
                    if buffer is not None:
                        module._buffers[key] = buffer.cuda()

    # --- what is here

    def local_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Names, as in the wrapped model, and parameters of this stage. Raises StepUsageError before the first step."""
        self._require_partition()
        return self.manager.local_parameters()

    def local_parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of this stage."""
        return (parameter for _, parameter in self.local_named_parameters())

    def local_named_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and buffers of this stage."""
        self._require_partition()
        return self.manager.local_buffers()

    def local_buffers(self) -> Iterator[torch.Tensor]:
        """The buffers of this stage."""
        return (buffer for _, buffer in self.local_named_buffers())

    def local_named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Names and modules of this stage."""
        self._require_partition()
        return self.manager.local_modules()

    def local_modules(self) -> Iterator[nn.Module]:
        """The modules of this stage."""
        return (module for _, module in self.local_named_modules())

    def default_reducer_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Those of this stage whose gradients are averaged over DP_GROUP: all (AWS API 1.6)."""
        return self.local_named_parameters()

    def scaled_batch_reducer_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Those whose gradients are averaged over RDP_GROUP: none, for no batch is scaled (AWS API 1.6)."""
        return iter(())

    def distributed_modules(self) -> Iterator[nn.Module]:
        """The tensor-parallel modules: none (AWS API 1.6)."""
        return iter(())

    def is_distributed_parameter(self, param: torch.Tensor) -> bool:
        """Whether tensor-parallel ranks have a part each: no (AWS API 1.6)."""
        return False

    def is_distributed_buffer(self, buf: torch.Tensor) -> bool:
        """Whether tensor-parallel ranks have a part each: no (AWS API 1.6)."""
        return False

    def is_scaled_batch_parameter(self, param: torch.Tensor) -> bool:
        """Whether it gets the batches of all tensor-parallel ranks: no (AWS API 1.6)."""
        return False

    def is_scaled_batch_buffer(self, buf: torch.Tensor) -> bool:
        """Whether it gets the batches of all tensor-parallel ranks: no (AWS API 1.6)."""
        return False

    def virtual_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """What the optimizer updates of this stage, without the copies that `fp16` and `bf16` have (AWS API 1.6)."""
        return self.local_named_parameters()

    def local_state_dict(self) -> dict[str, Any]:
        """What `state_dict` of the wrapped model would have, of this stage's modules."""
        self._require_partition()
        full = self.module.state_dict()
        local = {name for name, _ in self.manager.local_modules()}
        return {key: value for key, value in full.items() if key.rpartition(".")[0] in local}

    def state_dict(self, *args: Any, gather_to_rank0: bool = False, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The whole model's, in plain PyTorch's names, on every stage; all ranks of the first replica call it.

        gather_to_rank0: only on the first stage; an empty one elsewhere. Tensors are on the CPU.
        """
        if not self.partitioned:
            return dict(self.module.state_dict())
        local = {key: value.cpu() if hasattr(value, "cpu") else value for key, value in self.local_state_dict().items()}
        ranks = state.group("PP_GROUP")
        if gather_to_rank0:
            if state.rank != ranks[0]:
                state.objects.send(local, ranks[0], "state")
                return {}
            parts = [local, *(state.objects.receive(rank, "state") for rank in ranks[1:])]
        else:
            parts = state.objects.gather(local, ranks)
        return self._in_order({key: value for part in parts for key, value in part.items()})

    def _in_order(self, found: dict[str, Any]) -> dict[str, Any]:
        return {key: found[key] for key in self.module.state_dict() if key in found}

    def load_state_dict(
        self,
        state_dict: Mapping[str, Any],
        strict: bool = True,
        assign: bool = False,
        *,
        same_partition_load: bool = False,
    ) -> Any:
        """Load a state dict: at once if the model is placed, else as soon as it is.

        Args:
            state_dict: The whole model's, or at least what this stage has of it. Each stage takes its own part, and
                asks no other.
            strict: Whether missing and unexpected keys are errors.
            assign: No effect, and a warning if it is True: the parameters stay the same objects.
            same_partition_load: Whether this is what `local_state_dict` gave for the same partition. Either is as fast.

        Raises:
            RuntimeError: If `strict`, and keys are missing or unexpected.
        """
        if assign:
            warn_without_effect("assign=True of load_state_dict", "the optimizer knows the model's parameters")
        if not self.partitioned:
            self._to_load = dict(state_dict), strict
            return None
        local = set(self.local_state_dict())
        own = self.module.state_dict()
        wanted = OrderedDict((key, value) for key, value in state_dict.items() if key in local)
        # Without versions, torch takes it for that of an old BatchNorm, and fills in buffers that are on other stages.
        wanted._metadata = getattr(state_dict, "_metadata", None) or own._metadata  # type: ignore[attr-defined]
        missing = sorted(local - self._with_aliases(wanted))
        unexpected = sorted(set(state_dict) - set(own) - {_PARTIAL})
        if strict and (missing or unexpected):
            raise RuntimeError(
                f"load_state_dict: missing keys: {', '.join(missing) or 'none'}; "
                f"unexpected keys: {', '.join(unexpected) or 'none'}. Give strict=False to load what fits."
            )
        self.module.load_state_dict(wanted, strict=False)
        if state.optimizer is not None:
            state.optimizer.refresh_masters()
        return None

    def _with_aliases(self, names: Iterable[str]) -> set[str]:
        """`names`, and other names of the same parameters: files of safetensors have a tied parameter once."""
        parameters = dict(self.module.named_parameters(remove_duplicate=False))
        known = {id(parameters[name]) for name in names if name in parameters}
        return {*names, *(name for name, parameter in parameters.items() if id(parameter) in known)}

    def cpu(self) -> DistributedModel:
        """Gather the parameters and buffers of all stages on every stage, on the CPU (AWS API).

        All ranks of a replica call it. `get_module()` is the whole model then, but is routed to the stages when it is
        called: load its `state_dict` into another model. The next step frees the parameters of other stages again.
        """
        if not self.partitioned:
            return super().cpu()
        own = {name: p.detach().cpu() for name, p in (*self.local_named_parameters(), *self.local_named_buffers())}
        parts = state.objects.gather(own, state.group("PP_GROUP"))
        whole = {name: tensor for part in parts for name, tensor in part.items()}
        for name, parameter in self.module.named_parameters():
            parameter.data = whole[name]
            if parameter.grad is not None:
                parameter.grad = parameter.grad.cpu()
        for name, module in self.manager.modules.items():
            for key in [key for key, buffer in module._buffers.items() if buffer is not None]:
                module._buffers[key] = whole.get(f"{name}.{key}" if name else key, module._buffers[key])
        self._is_whole = True
        return self

    def join(self) -> NoReturn:
        """Not implemented (AWS API 1.2). Raises SMPUnsupportedError."""
        raise SMPUnsupportedError(
            "model.join() is not implemented: every replica must have as many batches as the others. Fix: give the "
            "loader's sampler drop_last=True, and call step functions outside of model.join()."
        )

    def register_comm_hook(self, state: Any, hook: Any) -> NoReturn:
        """Not implemented (AWS API 1.3). Raises SMPUnsupportedError."""
        raise SMPUnsupportedError(
            "model.register_comm_hook() is not implemented: it belongs to torch's DistributedDataParallel. "
            "Fix: leave it out; bucket_cap_mb and overlapping_allreduce say how gradients are averaged."
        )

    def get_module(self) -> nn.Module:
        """The wrapped model."""
        return self.module

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """As the wrapped model's: those of other stages are there, empty."""
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """As the wrapped model's."""
        return self.module.named_buffers(*args, **kwargs)

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """As the wrapped model's: who puts names together from these finds the names of `named_parameters`."""
        return self.module.named_children()

    def children(self) -> Iterator[nn.Module]:
        """The wrapped model, for `train`, `apply` and what else goes down the tree."""
        return iter((self.module,))

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> float:
        """Scale gradients down so that their norm over all stages is at most `max_norm`; the norm that they had.

        All ranks of a replica call it, after the step. torch.nn.utils.clip_grad_norm_ of all parameters does the same.
        """
        return clip(updated(self.local_parameters()), max_norm, norm_type)

    # --- hooks

    def when_placed(self, action: Callable[..., Any]) -> None:
        """Do this as soon as the model is placed: now, if it is."""
        if self.partitioned:
            action()
        else:
            _register(self._after_partition, action)

    def register_post_partition_hook(self, hook: _Hook) -> RemovableHandle:
        """Have `hook(model, optimizer)` called when the model is placed; at once if it is."""
        if self.partitioned:
            hook(self, state.optimizer)
        return _register(self._after_partition, hook)

    def register_post_step_hook(self, hook: _Hook) -> RemovableHandle:
        """Have `hook(model, optimizer)` called when the step that runs, or else the next one, has ended: once.

        transformers' Trainer loads the optimizer's state there, and never removes the hook.
        """
        return _register(self._after_step, hook)

    def _require_partition(self) -> None:
        if not self.partitioned:
            raise StepUsageError(
                "The model is not placed yet: it is at its first call in a step. Use register_post_partition_hook for "
                "what needs its local parameters."
            )


def _warn_of_tracing(device: str, times: bool, memory: bool, bucket_view: bool) -> None:
    if device not in ("gpu", "cpu"):
        raise SMPConfigError(f"trace_device is {device!r}: it must be 'gpu' or 'cpu'.")
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
