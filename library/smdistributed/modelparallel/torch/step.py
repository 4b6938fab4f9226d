"""`smp.step`: a function that runs once for each microbatch, on all stages together."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from smdistributed.modelparallel.backend.exceptions import StepUsageError
from smdistributed.modelparallel.torch.packing import pack, unpack
from smdistributed.modelparallel.torch.splitting import Splitter, detach, merge
from smdistributed.modelparallel.torch.state_mod import state
from smdistributed.modelparallel.torch.verification import Verification
from smdistributed.modelparallel.torch.work import current


def step(
    function: Callable[..., Any] | None = None,
    *,
    non_split_inputs: Sequence[str] = (),
    input_split_axes: Mapping[str, int] | None = None,
    detach_outputs: bool = True,
) -> Any:
    """Run a function once for each microbatch: forward and backward go inside, `optimizer.step()` outside (AWS API).

    Tensors among the arguments, also inside lists, tuples, dicts and sets, are split along axis 0; objects with a
    method `smp_slice(num_mb, mb, axis)` split themselves. All ranks call the function; its body runs on the first
    stage, and what it returns is returned on all: StepOutput in place of tensors, lists in place of anything else.

    non_split_inputs: names of arguments that every microbatch gets whole.
    input_split_axes: the axis along which an argument is split, by its name.
    detach_outputs: whether what is returned has no graph. Elsewhere than on the first stage it never has one.

    Raises MicrobatchError when an axis does not divide by the number of microbatches, SMPRuntimeError on all stages
    when one of them fails.
    """
    options = (tuple(non_split_inputs), dict(input_split_axes or {}), detach_outputs)
    if function is None:
        return lambda decorated: _decorate(decorated, *options)
    return _decorate(function, *options)


def _decorate(
    function: Callable[..., Any], whole: Sequence[str], axes: Mapping[str, int], detach_outputs: bool
) -> Callable[..., Any]:
    splitter = Splitter(function, whole, axes)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        state.require()
        if current() is not None:
            raise StepUsageError(f"{function.__qualname__} is called inside a step: steps cannot be nested.")
        splitter.uneven = state.cfg.uneven_microbatches
        model = state.the_model()
        model.before_step()
        verification = Verification(model) if state.stage.steps < state.verify_steps else None
        try:
            state.stage.begin(state.cfg)
            if state.stage.index:
                parts, (body, tensors) = [], state.stage.serve(model.apply_partition)
                results = unpack(body, tensors)
            else:
                parts = splitter.split(args, kwargs, state.cfg.microbatches)
                model.weights = splitter.weights(parts)
                results = _run(function, parts, detach_outputs)
        except BaseException as error:
            state.stage.fail(error)
            raise
        finally:
            had_backward = state.stage.leave()
        if verification:
            verification.compare(function, parts, results)
        model.after_step(had_backward)
        return merge(results)

    return wrapper


def _run(
    function: Callable[..., Any], parts: Sequence[tuple[tuple[Any, ...], dict[str, Any]]], detach_outputs: bool
) -> list[Any]:
    results = state.stage.run(lambda i: function(*parts[i][0], **parts[i][1]), len(parts))
    detached = detach(results)
    state.stage.end(pack(detached))
    return detached if detach_outputs else results
