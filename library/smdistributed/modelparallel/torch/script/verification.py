"""SMP_VERIFY_STEPS=k: the first k steps are run again without stages, and compared.

The first stage receives all parameters, and needs memory for the whole model. There the function of the step runs a
second time, on one thread, with a copy of the model. Each call draws the random numbers that it drew on its stage, so
that dropout is the same. Outputs and gradients are compared; a difference raises SMPRuntimeError on all stages. Other
effects of the function, such as counting or printing, happen twice.
"""

from __future__ import annotations

import copy
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from smdistributed.modelparallel.backend.config import VERIFY_VARIABLE
from smdistributed.modelparallel.backend.exceptions import SMPRuntimeError
from smdistributed.modelparallel.backend.schedule import TurnKind
from smdistributed.modelparallel.torch.pipeline.activations import remove_checkpointing
from smdistributed.modelparallel.torch.pipeline.module_manager import ModuleManager
from smdistributed.modelparallel.torch.pipeline.module_routing import calls_routed_by
from smdistributed.modelparallel.torch.pipeline.packing import pack
from smdistributed.modelparallel.torch.pipeline.stage import Hop, Stage
from smdistributed.modelparallel.torch.pipeline.tasks import (
    Generators,
    StageTask,
    as_current_task,
    current_task,
    derive_seed,
    draw_seed,
)
from smdistributed.modelparallel.torch.script.model import DistributedModel
from smdistributed.modelparallel.torch.script.state import TorchState

_Tensors = dict[str, Any]
_Parts = Sequence[tuple[tuple[Any, ...], dict[str, Any]]]
_MOST_NAMED = 5


class Verification:
    """Verifies one step. Make one before the step on all stages, and call `compare` after it."""

    def __init__(self, state: TorchState, model: DistributedModel) -> None:
        self._state, self._model = state, model
        self._gradients: _Tensors = {}
        self._buffers: _Tensors = {}
        model.when_placed(self._copy_tensors)

    def _copy_tensors(self, *_: Any) -> None:
        """Keeps the gradients and buffers that the step starts from."""
        gradients = {name: parameter.grad for name, parameter in self._model.local_named_parameters()}
        self._gradients = {name: None if grad is None else grad.clone() for name, grad in gradients.items()}
        self._buffers = {name: buffer.clone() for name, buffer in self._model.local_named_buffers()}

    def compare(self, function: Callable[..., Any], parts: _Parts, results: Sequence[Any]) -> None:
        """Compares the step with a run without stages. All stages call it. One rank of the job prints that it is equal.

        On the first stage, the function runs a second time, with a copy of the whole model. Raises SMPRuntimeError, on
        all stages, if outputs or gradients differ.
        """
        state, ranks = self._state, self._state.group("PP_GROUP")
        parameters = dict(self._model.local_named_parameters())
        own = (
            {**self._buffers, **{name: parameter.detach() for name, parameter in parameters.items()}},
            {name: self._gradient_of_step(name, parameter.grad) for name, parameter in parameters.items()},
        )
        everything = state.objects.gather_to_first(own, ranks, "verify")
        if everything:
            text, differs = self._compare_all(function, parts, results, everything)
            for rank in ranks[1:]:
                state.objects.send((text, differs), rank, "verify")
            if not differs and state.rank == state.group("DP_GROUP")[0]:
                print(text, file=sys.stderr)
        else:
            text, differs = state.objects.receive(ranks[0], "verify")
        if differs:
            raise SMPRuntimeError(text)

    def _gradient_of_step(self, name: str, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Returns the part of a gradient that the step added; None if there is none."""
        before = self._gradients.get(name)
        return gradient if gradient is None or before is None else gradient - before

    def _compare_all(
        self,
        function: Callable[..., Any],
        parts: _Parts,
        results: Sequence[Any],
        everything: Sequence[tuple[_Tensors, _Tensors]],
    ) -> tuple[str, bool]:
        """Returns a text, and whether anything differs. An error of the run without stages counts as a difference."""
        step = f"{VERIFY_VARIABLE}: step {self._state.stage.steps}"
        tensors = {name: tensor for own, _ in everything for name, tensor in own.items()}
        try:
            expected, reference = _run_without_stages(self._state, self._model, tensors, function, parts)
        except Exception:  # the script's code, any reason
            return f"{step} cannot be run without stages:\n{traceback.format_exc()}", True
        found = {name: gradient for _, own in everything for name, gradient in own.items()}
        outputs = zip(pack(results)[1], pack(expected)[1], strict=True)
        pairs = {f"output {place}": pair for place, pair in enumerate(outputs)}
        pairs.update({f"the gradient of {name}": (found[name], gradient) for name, gradient in reference.items()})
        return _describe_errors(step, {name: compare_tensors(*pair) for name, pair in pairs.items()})


def _describe_errors(step: str, errors: Mapping[str, tuple[float, float]]) -> tuple[str, bool]:
    """Returns a text that names at most `_MOST_NAMED` tensors, and whether an error, such as NaN, is not allowed."""
    wrong = [name for name, (error, allowed) in errors.items() if not error <= allowed]
    if not wrong:
        largest = max((error for error, _ in errors.values()), default=0.0)
        return f"{step} is as without stages: the largest difference is {largest:.1e} of a tensor's maximum.", False
    wrong.sort(key=lambda name: -errors[name][0])
    lines = [f"  {name}: {errors[name][0]:.1e} of its maximum" for name in wrong[:_MOST_NAMED]]
    more = f"\n  and {len(wrong) - _MOST_NAMED} more" if len(wrong) > _MOST_NAMED else ""
    return f"{step} differs from the same without stages in:\n" + "\n".join(lines) + more, True


def compare_tensors(found: torch.Tensor | None, expected: torch.Tensor | None) -> tuple[float, float]:
    """Returns the largest difference, relative to the largest finite element, and the one that the dtype allows.

    Elements that are NaN, or the same infinity, in both do not differ. The difference is infinite for another shape,
    for unequal integers, and if only one has a gradient that is not zero.
    """
    if found is None or expected is None:  # no gradient in this step; one from before may have stayed
        other = expected if found is None else found
        return (0.0 if other is None or not other.any() else float("inf")), 0.0
    if not expected.is_floating_point() or not expected.numel() or found.shape != expected.shape:
        return (0.0 if torch.equal(found, expected) else float("inf")), 0.0
    found, wide = found.detach().double(), expected.detach().double()
    other = ~((found == wide) | (found.isnan() & wide.isnan()))  # a scaled loss may overflow in both
    difference = (found - wide)[other].abs()
    error = (difference.max() / wide[wide.isfinite()].abs().max()).item() if difference.numel() else 0.0
    return error, torch.finfo(expected.dtype).eps ** 0.5


def _run_without_stages(
    state: TorchState, model: DistributedModel, tensors: _Tensors, function: Callable[..., Any], parts: _Parts
) -> tuple[list[Any], _Tensors]:
    """Runs on a copy of the whole model, with the same random numbers. Returns the results, and gradients by name."""
    whole = _copy_whole_model(model.module, tensors)
    manager = ModuleManager(whole, lambda: state.stage)
    manager.stages = model.manager.stages
    seeds = [state.stage.seed_of(microbatch) for microbatch in range(len(parts))]
    generators, results = Generators(), list[Any]()
    stage: Any = _AllStages(state.stage, manager, generators)
    try:
        with _substituted(state, model, whole, stage), calls_routed_by(manager):
            for microbatch, (args, kwargs) in enumerate(tree_map(_leaf, list(parts))):
                with _turn(generators, StageTask(microbatch, TurnKind.FORWARD, seeds[microbatch])):
                    results.append(function(*args, **kwargs))
    finally:
        generators.take_back()
    return results, {name: parameter.grad for name, parameter in whole.named_parameters()}


def _leaf(value: Any) -> Any:
    """Returns a tensor without a graph, with a gradient of its own; other values as they are."""
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value


def _copy_whole_model(module: nn.Module, tensors: Mapping[str, Any]) -> nn.Module:
    """`tensors` has the values of all stages, by name. The copy is not checkpointed."""
    parameters = dict(module.named_parameters())
    memo: dict[int, Any] = {
        id(parameter): nn.Parameter(tensors[name].clone(), parameter.requires_grad)
        for name, parameter in parameters.items()
    }
    memo.update({id(buffer): tensors[name].clone() for name, buffer in module.named_buffers()})
    whole = copy.deepcopy(module, memo)
    remove_checkpointing(whole)
    return whole


@contextmanager
def _substituted(state: TorchState, model: DistributedModel, whole: nn.Module, stage: Any) -> Iterator[None]:
    """Makes the wrapper call `whole`, and `state` have this stage, inside `with`."""
    split, model.module, own, state.stage = model.module, whole, state.stage, stage
    try:
        yield
    finally:
        model.module, state.stage = split, own


@contextmanager
def _turn(generators: Generators, task: StageTask) -> Iterator[None]:
    """Hands the random numbers to a task, then back. After an error, or without a task before, `take_back` must."""
    before = current_task()
    with as_current_task(task):
        generators.hand_to(task)
        yield
    if before is not None:
        generators.hand_to(before)


class _AllStages:
    """Stands in for a stage that has all modules: calls to other stages run here, with those stages' random numbers."""

    def __init__(self, own: Stage, manager: ModuleManager, generators: Generators) -> None:
        self._own, self._manager, self._generators = own, manager, generators
        self.index = own.index

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def call(self, route: Sequence[Hop], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls the modules of a route here, one after the other: see `Stage.call`."""
        task, before, seed = current_task(), self.index, draw_seed()
        assert task is not None
        for stage, names in route:
            self.index = stage
            with _turn(self._generators, StageTask(task.microbatch, TurnKind.FORWARD, seed)):
                value = self._manager.modules[names[0]](*args, **kwargs)
                for name in names[1:]:
                    value = self._manager.modules[name](value)
            args, kwargs, seed = (value,), {}, derive_seed(seed)
        self.index = before
        return value

    def make_way(self, kind: TurnKind) -> None:
        """Does nothing: no other stage waits."""

    def before_backward(self) -> None:
        """Does nothing: microbatches run one after the other."""
