"""`smp.step`: a function that runs once for each microbatch, on all stages together."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from smdistributed.modelparallel.backend import splitting
from smdistributed.modelparallel.backend.exceptions import StepUsageError
from smdistributed.modelparallel.backend.splitting import like
from smdistributed.modelparallel.torch.pipeline.packing import pack, unpack
from smdistributed.modelparallel.torch.pipeline.stage import Stage
from smdistributed.modelparallel.torch.pipeline.tasks import current_task
from smdistributed.modelparallel.torch.script.model import script_model
from smdistributed.modelparallel.torch.script.state import state
from smdistributed.modelparallel.torch.script.verification import Verification


class StepOutput:
    """The tensors that a function under `smp.step` returned, one for each microbatch (AWS API).

    Attributes:
        outputs: The tensors, in the order of the microbatches.
    """

    def __init__(self, outputs: Sequence[torch.Tensor]) -> None:
        self.outputs = list(outputs)

    def reduce_sum(self) -> torch.Tensor:
        """The sum of the microbatches' tensors, which must have the same shape."""
        return torch.stack(self.outputs).sum(0)

    def reduce_mean(self) -> torch.Tensor:
        """The mean of the microbatches' tensors, which must have the same shape and no integer dtype."""
        return torch.stack(self.outputs).mean(0)

    def concat(self) -> torch.Tensor:
        """The microbatches' tensors concatenated along axis 0; scalars become a vector."""
        return torch.cat([output.reshape(1) if output.dim() == 0 else output for output in self.outputs])

    def stack(self) -> torch.Tensor:
        """The microbatches' tensors along a new axis 0."""
        return torch.stack(self.outputs)

    def detach(self) -> StepOutput:
        """The same values without a graph. transformers' Trainer calls it."""
        return StepOutput([output.detach() for output in self.outputs])

    def __repr__(self) -> str:
        return f"StepOutput({self.outputs!r})"


class TorchSplitter(splitting.ArgumentSplitter):
    def is_tensor(self, value: Any) -> bool:
        return _is_tensor(value)

    def shape(self, tensor: torch.Tensor) -> tuple[int, ...]:
        return tuple(tensor.shape)

    def cut(self, tensor: torch.Tensor, count: int, axis: int) -> list[torch.Tensor]:
        return list(torch.tensor_split(tensor, count, axis))


def merge(results: Sequence[Any]) -> Any:
    """Merges the results of microbatches: StepOutput in place of tensors, lists in place of other values."""
    return splitting.merge(results, _is_tensor, StepOutput)


def detach(result: Any) -> Any:
    """Returns nested containers with all tensors detached from their graph; the given ones are not changed."""
    if isinstance(result, torch.Tensor):
        return result.detach()
    if isinstance(result, Mapping):
        return like(result, {key: detach(item) for key, item in result.items()})
    if isinstance(result, (tuple, list)):
        return like(result, [detach(item) for item in result])
    return result


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def step(
    function: Callable[..., Any] | None = None,
    *,
    non_split_inputs: Sequence[str] = (),
    input_split_axes: Mapping[str, int] | None = None,
    detach_outputs: bool = True,
) -> Any:
    """Makes a function run once for each microbatch: forward and backward go inside, `optimizer.step()` outside.

    A decorator, with or without arguments (AWS API). All ranks call the decorated function; its body runs on the first
    stage.

    Tensors among the arguments, also inside lists, tuples, dicts and sets, are split along axis 0. Objects with a
    method `smp_slice(num_mb, mb, axis)` split themselves.

    Args:
        function: The function.
        non_split_inputs: Names of arguments that every microbatch gets whole.
        input_split_axes: The axis along which an argument is split, by its name.
        detach_outputs: Whether returned tensors have no graph. On other stages than the first they never have one.

    Returns:
        A function that returns the merged results on all ranks. StepOutput takes the place of tensors, and lists of the
        microbatches' values the place of other values. It raises MicrobatchError if an axis does not divide by the
        number of microbatches (with `uneven_microbatches`: is smaller). It raises StepUsageError inside another step or
        without a model. If a stage fails, it raises its error there. Other stages raise SMPRuntimeError, in this step
        and every later one.
    """
    options = (tuple(non_split_inputs), dict(input_split_axes or {}), detach_outputs)
    if function is None:
        return lambda decorated: _decorate(decorated, *options)
    return _decorate(function, *options)


def _decorate(
    function: Callable[..., Any], whole: Sequence[str], axes: Mapping[str, int], detach_outputs: bool
) -> Callable[..., Any]:
    """Wraps a function so that it runs as a step. Other stages than the first serve calls instead of running it.

    The first SMP_VERIFY_STEPS steps are compared with a run without stages. An error ends the step on all stages.
    Raises StepUsageError inside a step.
    """
    splitter = TorchSplitter(function, whole, axes)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        state.require()
        if current_task() is not None:
            raise StepUsageError(
                f"{function.__qualname__} is called inside a step: steps cannot be nested. Fix: call it as a plain "
                "function, without @smp.step."
            )
        splitter.uneven = state.cfg.uneven_microbatches
        model, stage = script_model(state), state.stage
        model.before_step()
        verification = Verification(state, model) if stage.steps < state.verify_steps else None
        try:
            stage.begin(state.cfg)
            if stage.index:
                parts, (body, tensors) = [], stage.serve(model.apply_partition)
                results = unpack(body, tensors)
            else:
                parts = splitter.split(args, kwargs, state.cfg.microbatches)
                model.weights = splitter.weights(parts)
                results = _run(stage, function, parts, detach_outputs)
        except BaseException as error:
            stage.failures.fail(error)
            raise
        finally:
            had_backward = stage.leave()
        if verification:
            verification.compare(function, parts, results)
        model.after_step(had_backward)
        return merge(results)

    return wrapper


def _run(
    stage: Stage,
    function: Callable[..., Any],
    parts: Sequence[tuple[tuple[Any, ...], dict[str, Any]]],
    detach_outputs: bool,
) -> list[Any]:
    """Runs the microbatches on the first stage. Sends detached results to the other stages, which ends their step."""
    results = stage.run(lambda i: function(*parts[i][0], **parts[i][1]), len(parts))
    detached = detach(results)
    stage.end(pack(detached))
    return detached if detach_outputs else results
