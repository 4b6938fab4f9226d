"""The modules of the script's model: which stage has which, and how calls reach modules of other stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from smdistributed.modelparallel.backend.exceptions import StepUsageError
from smdistributed.modelparallel.backend.schedule import TurnKind
from smdistributed.modelparallel.torch.pipeline.activations import Checkpointing, active_checkpointing, run_sequence
from smdistributed.modelparallel.torch.pipeline.stage import Hop, Stage
from smdistributed.modelparallel.torch.pipeline.tasks import current_task

_PLACEMENT = "_smp_placement"


@dataclass(frozen=True)
class Placement:
    """The place of a module. begins_part: whether its parent spans several stages, so that turns may change here."""

    name: str
    stage: int
    begins_part: bool


def placement_of(module: nn.Module) -> Placement | None:
    """Returns the place of a module; None if it belongs to no placed model."""
    return module.__dict__.get(_PLACEMENT)


class ModuleManager:
    """The modules of one model, by name. Until `assign`, nothing is placed."""

    def __init__(self, root: nn.Module, stage: Callable[[], Stage]) -> None:
        self.root, self._stage = root, stage
        self.modules: dict[str, nn.Module] = dict(root.named_modules())
        self.stages: dict[str, int] = {}
        self._without_gradients: set[nn.Parameter] = set()
        self.translate_functions: list[tuple[Callable[..., Any], Callable[..., Any]]] = []
        """Functions that translate state dicts of `smp.nn` modules to other libraries and back (AWS 1.10)."""

    @property
    def index(self) -> int:
        return self._stage().index

    def refresh_modules(self) -> None:
        """Finds the modules again: scripts may replace some between wrapping and the first step."""
        self.modules = dict(self.root.named_modules())

    def assign(self, stages: Mapping[str, int]) -> None:
        """Places every module, and frees the parameters and buffers of other stages. Turns off torch's fast path."""
        self.stages = dict(stages)
        for name, module in self.modules.items():
            parent = name.rpartition(".")[0]
            spans = name != "" and self._spans(parent)
            module.__dict__[_PLACEMENT] = Placement(name, stages[name], spans)
            if self._spans(name):
                _disable_fast_path(module)
        self.release_remote_tensors()

    def is_local(self, name: str) -> bool:
        return self.stages[name] == self.index

    def stage_of(self, module: nn.Module) -> int | None:
        """The stage of a module; None if it does not belong to this model, or is not placed."""
        name = next((name for name, known in self.modules.items() if known is module), None)
        return None if name is None else self.stages.get(name)

    def stages_of(self, tensors: Iterable[torch.Tensor]) -> set[int]:
        """The stages of the given tensors that are parameters of the model. All ranks find the same."""
        owners = {
            id(p): self.stages[name] for name, module in self.modules.items() for p in module._parameters.values()
        }
        return {owners[id(tensor)] for tensor in tensors if id(tensor) in owners}

    def local_modules(self) -> Iterator[tuple[str, nn.Module]]:
        return ((name, module) for name, module in self.modules.items() if self.is_local(name))

    def local_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields names and parameters of this stage's modules; a shared one once, by its first name."""
        yield from self._tensors(lambda module: module._parameters)

    def local_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields names and buffers of this stage's modules; a shared one once, by its first name."""
        yield from self._tensors(lambda module: module._buffers)

    def call_remote(self, place: Placement, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a module that is on another stage, and waits for its output. Raises StepUsageError outside a step."""
        self._require_step(place)
        return self._stage().call([(place.stage, (place.name,))], args, kwargs)

    def call_sequence(self, place: Placement, module: nn.Sequential, value: Any) -> Any:
        """Between two other stages the value is sent directly. Raises StepUsageError outside of a step."""
        hops = list(self._hops(module))
        while hops:
            stage, names = hops[0]
            if stage == self.index:
                value = self.run(names, value, active_checkpointing(module))
                del hops[0]
                continue
            self._require_step(place)
            count = next((i for i, (stage, _) in enumerate(hops) if stage == self.index), len(hops))
            value = self._stage().call(hops[:count], (value,), {})
            del hops[:count]
        return value

    def run(self, names: Sequence[str], value: Any, how: Checkpointing | None) -> Any:
        return run_sequence([self.modules[name] for name in names], value, how)

    def make_way(self, kind: TurnKind) -> None:
        """Lets more urgent turns go first, where a part of the model begins: see `Stage.make_way`."""
        self._stage().make_way(kind)

    def is_split(self, module: nn.Sequential) -> bool:
        """Whether the children of a sequence are called one by one: some are remote, or checkpointed in groups."""
        # Its hooks would not be called, nor a forward of its own.
        if type(module).forward is not nn.Sequential.forward or module._forward_hooks or module._forward_pre_hooks:
            return False
        return bool(active_checkpointing(module)) or any(not self.is_local(self._name_of(child)) for child in module)

    def _hops(self, module: nn.Sequential) -> Iterator[Hop]:
        """Yields runs of consecutive children that are on one stage: the stage and their names."""
        names = [self._name_of(child) for child in module]
        begin = 0
        for end in range(1, len(names) + 1):
            if end == len(names) or self.stages[names[end]] != self.stages[names[begin]]:
                yield self.stages[names[begin]], tuple(names[begin:end])
                begin = end

    def _name_of(self, module: nn.Module) -> str:
        name: str = module.__dict__[_PLACEMENT].name
        return name

    def _spans(self, name: str) -> bool:
        below = {stage for other, stage in self.stages.items() if not name or f"{other}.".startswith(f"{name}.")}
        return len(below) > 1

    def _require_step(self, place: Placement) -> None:
        if current_task() is None:
            raise StepUsageError(
                f"{place.name or 'The model'} is called outside a step, where stages cannot call each other. Fix: "
                "call it inside a function under @smp.step, on all ranks."
            )

    def release_remote_tensors(self) -> None:
        """Parameter objects stay, without elements or gradients. If backward reaches one, it raises StepUsageError."""
        keep = {id(tensor) for _, tensor in (*self.local_parameters(), *self.local_buffers())}
        for name, module in self.modules.items():
            if self.is_local(name):
                continue
            for parameter in module._parameters.values():
                if parameter is not None and id(parameter) not in keep:
                    parameter.data = parameter.data.new_empty(0)
                    parameter.grad = None
                    if parameter.requires_grad and parameter not in self._without_gradients:
                        self._without_gradients.add(parameter)
                        _refuse_gradients(parameter, self.stages[name], self.index)
            for key, buffer in module._buffers.items():
                if buffer is not None and id(buffer) not in keep:
                    module._buffers[key] = buffer.new_empty(0)

    def _tensors(self, own: Callable[[nn.Module], Mapping[str, Any]]) -> Iterator[tuple[str, Any]]:
        """Yields names and tensors of this stage, a shared one once. `own` returns the tensors of one module."""
        seen = set()
        for name, module in self.local_modules():
            for key, tensor in own(module).items():
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield f"{name}.{key}" if name else key, tensor


def _disable_fast_path(module: nn.Module) -> None:
    """The fast path needs all children's parameters on one stage, and passes nested tensors, which cannot be sent."""
    if isinstance(module, nn.TransformerEncoderLayer):
        module.activation_relu_or_gelu = 0
    if isinstance(module, nn.TransformerEncoder):
        module.enable_nested_tensor = module.use_nested_tensor = False


def _refuse_gradients(parameter: nn.Parameter, stage: int, here: int) -> None:
    """Makes backward raise StepUsageError. A sum over all parameters would miss parameters of other stages."""

    def refuse(_: torch.Tensor) -> None:
        if parameter.numel() == 0:
            raise StepUsageError(
                f"The step on stage {here} uses a parameter of stage {stage} outside of its module: its values are not "
                "here. Fix: leave penalties on parameters to the optimizer's weight_decay, or compute them in "
                "the forward of the modules that have the parameters."
            )

    parameter.register_hook(refuse)  # type: ignore[no-untyped-call]
