"""SMP_VERIFY_STEPS=k: the first k steps are run again without stages, and compared.

The first stage gets all parameters, and has memory for the whole model. There the function of the step runs a second
time, in one thread, on a copy of the model: with the random numbers that each call had on its stage, so that dropout is
the same. Outputs and gradients are compared; a difference raises SMPRuntimeError on all stages. What the function does
beside calling the model (counting, printing) is done twice.
"""

from __future__ import annotations

import copy
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from smdistributed.modelparallel.backend import schedule
from smdistributed.modelparallel.backend.config import VERIFY_VARIABLE
from smdistributed.modelparallel.backend.exceptions import SMPRuntimeError
from smdistributed.modelparallel.torch.activations import forget_marks
from smdistributed.modelparallel.torch.module_manager import ModuleManager, calls_routed_by
from smdistributed.modelparallel.torch.packing import pack
from smdistributed.modelparallel.torch.stage import Hop, Stage
from smdistributed.modelparallel.torch.state_mod import state
from smdistributed.modelparallel.torch.work import Generators, Work, current, draw_seed, mix, working_on

if TYPE_CHECKING:
    from smdistributed.modelparallel.torch.model import DistributedModel

_Tensors = dict[str, Any]
_Parts = Sequence[tuple[tuple[Any, ...], dict[str, Any]]]
_MOST_NAMED = 5


class Verification:
    """One step: what it starts from, and then the comparison. All stages make one, and call `compare` afterwards."""

    def __init__(self, model: DistributedModel) -> None:
        self._model = model
        self._gradients: _Tensors = {}
        self._tensors: _Tensors = {}
        model.when_placed(self._note)

    def _note(self, *_: Any) -> None:
        gradients = {name: parameter.grad for name, parameter in self._model.local_named_parameters()}
        self._gradients = {name: None if grad is None else grad.clone() for name, grad in gradients.items()}
        self._tensors = {name: buffer.clone() for name, buffer in self._model.local_named_buffers()}

    def compare(self, function: Callable[..., Any], parts: _Parts, results: Sequence[Any]) -> None:
        """parts, results: of each microbatch, on the first stage. Raises SMPRuntimeError on all when they differ."""
        ranks = state.group("PP_GROUP")
        parameters = dict(self._model.local_named_parameters())
        own = (
            {**self._tensors, **{name: parameter.detach() for name, parameter in parameters.items()}},
            {name: self._of_this_step(name, parameter.grad) for name, parameter in parameters.items()},
        )
        if state.rank != ranks[0]:
            state.objects.send(own, ranks[0], "verify")
            told, differs = state.objects.receive(ranks[0], "verify")
        else:
            everything = [own, *(state.objects.receive(rank, "verify") for rank in ranks[1:])]
            told, differs = self._verdict(function, parts, results, everything)
            for rank in ranks[1:]:
                state.objects.send((told, differs), rank, "verify")
            if not differs and state.rank == state.group("DP_GROUP")[0]:
                print(told, file=sys.stderr)
        if differs:
            raise SMPRuntimeError(told)

    def _of_this_step(self, name: str, gradient: torch.Tensor | None) -> torch.Tensor | None:
        before = self._gradients.get(name)
        return gradient if gradient is None or before is None else gradient - before

    def _verdict(
        self,
        function: Callable[..., Any],
        parts: _Parts,
        results: Sequence[Any],
        everything: Sequence[tuple[_Tensors, _Tensors]],
    ) -> tuple[str, bool]:
        step = f"{VERIFY_VARIABLE}: step {state.stage.steps}"
        tensors = {name: tensor for own, _ in everything for name, tensor in own.items()}
        try:
            expected, reference = _run_alone(self._model, tensors, function, parts)
        except Exception:  # the script's code, any reason
            return f"{step} cannot be run without stages:\n{traceback.format_exc()}", True
        found = {name: gradient for _, own in everything for name, gradient in own.items()}
        pairs = {
            f"output {place}": pair for place, pair in enumerate(zip(pack(results)[1], pack(expected)[1], strict=True))
        }
        pairs.update({f"the gradient of {name}": (found[name], gradient) for name, gradient in reference.items()})
        errors = {name: _error(*pair) for name, pair in pairs.items()}
        wrong = [name for name, (error, allowed) in errors.items() if not error <= allowed]
        if not wrong:
            largest = max((error for error, _ in errors.values()), default=0.0)
            return f"{step} is as without stages: the largest difference is {largest:.1e} of a tensor's maximum.", False
        wrong.sort(key=lambda name: -errors[name][0])
        lines = [f"  {name}: {errors[name][0]:.1e} of its maximum" for name in wrong[:_MOST_NAMED]]
        more = f"\n  and {len(wrong) - _MOST_NAMED} more" if len(wrong) > _MOST_NAMED else ""
        return f"{step} differs from the same without stages in:\n" + "\n".join(lines) + more, True


def _error(found: torch.Tensor | None, expected: torch.Tensor | None) -> tuple[float, float]:
    """The largest difference, as a share of the largest element, and what the dtype allows."""
    if found is None or expected is None:  # no gradient in this step; what there was before may have stayed
        other = expected if found is None else found
        return (0.0 if other is None or not other.any() else float("inf")), 0.0
    if not expected.is_floating_point() or not expected.numel() or found.shape != expected.shape:
        return (0.0 if torch.equal(found, expected) else float("inf")), 0.0
    found, wide = found.detach().double(), expected.detach().double()
    other = ~((found == wide) | (found.isnan() & wide.isnan()))  # a scaled loss may overflow, here and there alike
    difference = (found - wide)[other].abs()
    error = (difference.max() / wide.abs().max()).item() if difference.numel() else 0.0
    return error, torch.finfo(expected.dtype).eps ** 0.5


def _run_alone(
    model: DistributedModel, tensors: _Tensors, function: Callable[..., Any], parts: _Parts
) -> tuple[list[Any], _Tensors]:
    """What the function returns for each microbatch, and the gradients, without stages."""
    whole = _filled_in(model.module, tensors)
    manager = ModuleManager(whole, lambda: state.stage)
    manager.stages = model.manager.stages
    seeds = [state.stage.seed_of(microbatch) for microbatch in range(len(parts))]
    generators, results = Generators(), list[Any]()
    stage: Any = _AllStages(state.stage, manager, generators)
    try:
        with _in_place_of(model, whole, stage), calls_routed_by(manager):
            for microbatch, (args, kwargs) in enumerate(tree_map(_leaf, list(parts))):
                with _turn(generators, Work(microbatch, schedule.Kind.FORWARD, seeds[microbatch])):
                    results.append(function(*args, **kwargs))
    finally:
        generators.take_back()
    return results, {name: parameter.grad for name, parameter in whole.named_parameters()}


def _leaf(value: Any) -> Any:
    """A tensor whose gradient is not the script's."""
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value


def _filled_in(module: nn.Module, tensors: Mapping[str, Any]) -> nn.Module:
    """A copy of the model with all its parameters and buffers."""
    parameters = dict(module.named_parameters())
    memo: dict[int, Any] = {
        id(parameter): nn.Parameter(tensors[name].clone(), parameter.requires_grad)
        for name, parameter in parameters.items()
    }
    memo.update({id(buffer): tensors[name].clone() for name, buffer in module.named_buffers()})
    whole = copy.deepcopy(module, memo)
    forget_marks(whole)
    return whole


@contextmanager
def _in_place_of(model: DistributedModel, whole: nn.Module, stage: Any) -> Iterator[None]:
    split, model.module, own, state.stage = model.module, whole, state.stage, stage
    try:
        yield
    finally:
        model.module, state.stage = split, own


@contextmanager
def _turn(generators: Generators, work: Work) -> Iterator[None]:
    """Do this work, with its random numbers, and then go on with what was done before."""
    before = current()
    with working_on(work):
        generators.hand_to(work)
        yield
    if before is not None:
        generators.hand_to(before)


class _AllStages:
    """In place of a stage: it has all modules. What is called on another stage is called here, with its own numbers."""

    def __init__(self, own: Stage, manager: ModuleManager, generators: Generators) -> None:
        self._own, self._manager, self._generators = own, manager, generators
        self.index = own.index

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def call(self, route: Sequence[Hop], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        work, before, seed = current(), self.index, draw_seed()
        assert work is not None
        for stage, names in route:
            self.index = stage
            with _turn(self._generators, Work(work.microbatch, schedule.Kind.FORWARD, seed)):
                value = self._manager.modules[names[0]](*args, **kwargs)
                for name in names[1:]:
                    value = self._manager.modules[name](value)
            args, kwargs, seed = (value,), {}, mix(seed)
        self.index = before
        return value

    def boundary(self, kind: schedule.Kind) -> None:
        """No other stage waits."""

    def before_backward(self) -> None:
        """Nothing waits for anything."""
