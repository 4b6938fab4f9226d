"""The tree of modules of the model: which stage has which module, and how a call of one is routed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from smdistributed.modelparallel.backend import schedule
from smdistributed.modelparallel.backend.exceptions import SMPConfigError, StepUsageError
from smdistributed.modelparallel.torch.activations import Checkpointing, marked, run, run_checkpointed
from smdistributed.modelparallel.torch.stage import Hop, Stage
from smdistributed.modelparallel.torch.work import current

_PLACE = "_smp_place"
_PARTITION = "_smp_partition"


@dataclass(frozen=True)
class Place:
    """What a call of a module has to know. part: the module begins a part of a model that spans stages."""

    name: str
    stage: int
    part: bool


class ModuleManager:
    """The modules of one model, by name. Until `assign`, nothing is placed."""

    def __init__(self, root: nn.Module, stage: Callable[[], Stage]) -> None:
        self.root, self._stage = root, stage
        self.modules: dict[str, nn.Module] = dict(root.named_modules())
        self.stages: dict[str, int] = {}
        self._refusing: set[nn.Parameter] = set()
        self.translate_functions: list[tuple[Callable[..., Any], Callable[..., Any]]] = []
        """What makes state dicts of `smp.nn` modules those of other libraries, and back (AWS 1.10): nothing yet."""

    @property
    def index(self) -> int:
        """This rank's stage."""
        return self._stage().index

    def look_again(self) -> None:
        """Take the modules that there are now: scripts also exchange some between the wrapping and the first step."""
        self.modules = dict(self.root.named_modules())

    def assign(self, stages: Mapping[str, int]) -> None:
        """Place every module on its stage, and give up the parameters and buffers of those of other stages."""
        self.stages = dict(stages)
        for name, module in self.modules.items():
            parent = name.rpartition(".")[0]
            spans = name != "" and self._spans(parent)
            module.__dict__[_PLACE] = Place(name, stages[name], spans)
            if self._spans(name):
                _leave_fast_path(module)
        _route_calls(self)
        self.give_up()

    def is_local(self, name: str) -> bool:
        """Whether the module of that name is on this stage."""
        return self.stages[name] == self.index

    def place_of(self, module: nn.Module) -> int | None:
        """The stage of a module; None: it is not of this model, or not placed."""
        name = next((name for name, known in self.modules.items() if known is module), None)
        return None if name is None else self.stages.get(name)

    def stages_of(self, tensors: Iterable[torch.Tensor]) -> set[int]:
        """The stages of those of these that are parameters of the model; all ranks find the same."""
        owners = {
            id(p): self.stages[name] for name, module in self.modules.items() for p in module._parameters.values()
        }
        return {owners[id(tensor)] for tensor in tensors if id(tensor) in owners}

    def local_modules(self) -> Iterator[tuple[str, nn.Module]]:
        return ((name, module) for name, module in self.modules.items() if self.is_local(name))

    def local_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Those of modules of this stage, each once, by its first name."""
        yield from self._tensors(lambda module: module._parameters)

    def local_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._tensors(lambda module: module._buffers)

    def call(self, place: Place, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the module, which is on another stage."""
        self._require_step(place)
        return self._stage().call([(place.stage, (place.name,))], args, kwargs)

    def chain(self, place: Place, module: nn.Sequential, value: Any) -> Any:
        """Run a sequence that spans stages: what other stages have of it goes from each to the next."""
        hops = list(self._hops(place.name, module))
        while hops:
            stage, names = hops[0]
            if stage == self.index:
                value = self.run(names, value, marked(module))
                del hops[0]
                continue
            self._require_step(place)
            count = next((i for i, (stage, _) in enumerate(hops) if stage == self.index), len(hops))
            value = self._stage().call(hops[:count], (value,), {})
            del hops[:count]
        return value

    def run(self, names: Sequence[str], value: Any, how: Checkpointing | None) -> Any:
        """Call modules of this stage one after the other."""
        return run([self.modules[name] for name in names], value, how)

    def boundary(self, kind: schedule.Kind) -> None:
        """A part of the model begins here."""
        self._stage().boundary(kind)

    def _hops(self, name: str, module: nn.Sequential) -> Iterator[Hop]:
        names = [self._name_of(child) for child in module]
        begin = 0
        for end in range(1, len(names) + 1):
            if end == len(names) or self.stages[names[end]] != self.stages[names[begin]]:
                yield self.stages[names[begin]], tuple(names[begin:end])
                begin = end

    def _name_of(self, module: nn.Module) -> str:
        name: str = module.__dict__[_PLACE].name
        return name

    def _spans(self, name: str) -> bool:
        """Whether the module and what is below it are on several stages."""
        below = {stage for other, stage in self.stages.items() if not name or f"{other}.".startswith(f"{name}.")}
        return len(below) > 1

    def _require_step(self, place: Place) -> None:
        if current() is None:
            raise StepUsageError(
                f"{place.name or 'The model'} is called outside a step: stages work together only inside a function "
                "under @smp.step, which all ranks call."
            )

    def give_up(self) -> None:
        """Have the parameters and buffers of other stages' modules take no memory."""
        keep = {id(tensor) for _, tensor in (*self.local_parameters(), *self.local_buffers())}
        for name, module in self.modules.items():
            if self.is_local(name):
                continue
            for parameter in module._parameters.values():
                if parameter is not None and id(parameter) not in keep:
                    parameter.data = parameter.data.new_empty(0)
                    parameter.grad = None
                    if parameter.requires_grad and parameter not in self._refusing:
                        self._refusing.add(parameter)
                        _refuse_gradients(parameter, self.stages[name], self.index)
            for key, buffer in module._buffers.items():
                if buffer is not None and id(buffer) not in keep:
                    module._buffers[key] = buffer.new_empty(0)

    def _tensors(self, own: Callable[[nn.Module], Mapping[str, Any]]) -> Iterator[tuple[str, Any]]:
        seen = set()
        for name, module in self.local_modules():
            for key, tensor in own(module).items():
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield f"{name}.{key}" if name else key, tensor


def _leave_fast_path(module: nn.Module) -> None:
    """In evaluation torch would pass parameters of a layer's children, which are elsewhere, to one kernel, and nested
    tensors, which are no messages, from layer to layer."""
    if isinstance(module, nn.TransformerEncoderLayer):
        module.activation_relu_or_gelu = 0
    if isinstance(module, nn.TransformerEncoder):
        module.enable_nested_tensor = module.use_nested_tensor = False


def _refuse_gradients(parameter: nn.Parameter, stage: int, here: int) -> None:
    """Have a parameter of another stage raise StepUsageError in backward: only code beside its module can have used it.

    It has no elements here. A sum of squares over all parameters, say, would lack those of the other stages.
    """

    def refuse(_: torch.Tensor) -> None:
        if parameter.numel() == 0:
            raise StepUsageError(
                f"The step on stage {here} uses a parameter of stage {stage} by itself, not by its module: its values "
                "are not here. Fix: leave penalties on parameters to the optimizer's weight_decay, or compute them in "
                "the forward of the modules that have the parameters."
            )

    parameter.register_hook(refuse)  # type: ignore[no-untyped-call]


def manual_stages(manager: ModuleManager, default: int, partitions: int) -> dict[str, int]:
    """The stages that `smp.partition` and `smp.set_partition` gave; the parent's, or the default, where they gave none.

    Modules that share a parameter are on the stage of the first of them. Raises SMPConfigError for a stage that is not
    there.
    """
    stages: dict[str, int] = {}
    owners: dict[int, int] = {}
    for name, module in manager.modules.items():
        inherited = stages[name.rpartition(".")[0]] if name else default
        stage = module.__dict__.get(_PARTITION, inherited)
        if not 0 <= stage < partitions:
            raise SMPConfigError(
                f"{name or 'The model'} is put into partition {stage}: they count from 0 to {partitions - 1}."
            )
        for parameter in module._parameters.values():
            if parameter is not None:
                stage = owners.setdefault(id(parameter), stage)
        stages[name] = stage
    return stages


_current_partition: list[int] = []


@contextmanager
def partition(index: int) -> Iterator[None]:
    """Put modules that are constructed inside `with` into that partition; of nested ones the innermost decides."""
    _stamp_new_modules()
    _current_partition.append(index)
    try:
        yield
    finally:
        _current_partition.pop()


def set_partition(module: nn.Module, index: int) -> None:
    """Put a module, and those below it that have no partition of their own, into that partition.

    Raises SMPConfigError when it is placed already, in another one.
    """
    placed = _placed.place_of(module) if _placed else None
    if placed is not None and placed != index:
        raise SMPConfigError(
            f"smp.set_partition: the module is in partition {placed} already, and cannot go to {index}. Fix: call it "
            "before the model's first step, and with 1 partition for index 0 only."
        )
    module.__dict__[_PARTITION] = index


def has_partition(module: nn.Module) -> bool:
    """Whether `smp.partition` or `smp.set_partition` said where it is to be."""
    return _PARTITION in module.__dict__


def _stamp_new_modules() -> None:
    if getattr(nn.Module.__init__, "_smp", False):
        return
    original = nn.Module.__init__

    def __init__(self: nn.Module, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        original(self, *args, **kwargs)
        if _current_partition:
            self.__dict__[_PARTITION] = _current_partition[-1]

    __init__._smp = True  # type: ignore[attr-defined]
    nn.Module.__init__ = __init__  # type: ignore[method-assign]


_placed: ModuleManager | None = None
"""The manager of the one model of the script, once it is placed."""


def _route_calls(placed: ModuleManager) -> None:
    """Have calls of modules ask first where the module is. Other modules pay for one look into a dictionary."""
    global _placed
    _placed = placed
    if getattr(nn.Module.__call__, "_smp", False):
        return
    original = nn.Module.__call__

    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        place, manager = self.__dict__.get(_PLACE), _placed
        if place is None or manager is None:
            return original(self, *args, **kwargs)
        if place.stage != manager.index:
            return manager.call(place, args, kwargs)
        if place.part:
            manager.boundary(schedule.Kind.FORWARD)
        if isinstance(self, nn.Sequential) and _is_split(manager, self):
            outputs = manager.chain(place, self, *args)
        else:
            outputs = run_checkpointed(original, self, args, kwargs)
        if place.part:
            _mark(outputs, lambda _: manager.boundary(schedule.Kind.BACKWARD))
        return outputs

    __call__._smp = True  # type: ignore[attr-defined]
    nn.Module.__call__ = __call__  # type: ignore[method-assign]


@contextmanager
def calls_routed_by(manager: ModuleManager) -> Iterator[None]:
    """Have another manager asked where modules are, inside `with`."""
    global _placed
    before, _placed = _placed, manager
    try:
        yield
    finally:
        _placed = before


def _is_split(manager: ModuleManager, module: nn.Sequential) -> bool:
    """Whether its children are called one by one: some are elsewhere, or they are checkpointed in groups.

    Not if somebody has hooks on it, which would not be called.
    """
    if type(module).forward is not nn.Sequential.forward or module._forward_hooks or module._forward_pre_hooks:
        return False
    return bool(marked(module)) or any(not manager.is_local(manager._name_of(child)) for child in module)


def _mark(outputs: Any, hook: Callable[[torch.Tensor], None]) -> None:
    """Call `hook` before the gradients of these outputs go on backward."""
    if isinstance(outputs, torch.Tensor):
        if outputs.requires_grad:
            outputs.register_hook(hook)  # type: ignore[no-untyped-call]
    elif isinstance(outputs, (tuple, list)):
        for output in outputs:
            _mark(output, hook)
    elif isinstance(outputs, Mapping):
        for output in outputs.values():
            _mark(output, hook)
