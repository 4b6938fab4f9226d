"""`smp.step`: turns a function into one graph that runs it for every microbatch, on all stages together."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from smdistributed.core.options import keyword_names, refuse_unknown, warn_without_effect
from smdistributed.core.tensorflow.operations import reject_xla
from smdistributed.modelparallel.backend.exceptions import SMPUnsupportedError
from smdistributed.modelparallel.tensorflow.model import plan_call
from smdistributed.modelparallel.tensorflow.splitting import TensorFlowSplitter, merge
from smdistributed.modelparallel.tensorflow.state_mod import state
from smdistributed.modelparallel.tensorflow.step_graph import StageContext, StepGraph


def step(
    function: Callable[..., Any] | None = None,
    *,
    non_split_inputs: Sequence[str] = (),
    input_split_axes: Mapping[str, int] | None = None,
    detach_outputs: bool = True,
    **options: Any,
) -> Any:
    """Decorates a function so that it runs once for every microbatch, as one tf.function (AWS API).

    The forward pass and the gradients go inside, `optimizer.apply_gradients` outside. All ranks call the function, with
    the same batch on all stages of a replica. Tensors among the arguments, also inside lists, tuples, dicts and sets,
    are split; objects with a method `smp_slice(num_mb, mb, axis)` split themselves.

    Args:
        function: Takes and returns nested structures of tensors. None: `step` is used with options, as
            `@smp.step(non_split_inputs=["scale"])`.
        non_split_inputs: Names of arguments that every microbatch gets whole.
        input_split_axes: The axis along which an argument is split, by name. Default: 0.
        detach_outputs: For the PyTorch interface. No output has a gradient here, and False gets a warning.
        options: Options of tf.function, such as `input_signature`.

    Returns:
        The function. It returns `StepOutput`s in place of tensors, and lists in place of other values.

    Raises:
        MicrobatchError: If an option names an unknown argument. When called, if an axis is not a multiple of
            `microbatches`.
        SMPUnsupportedError: For `jit_compile=True`; when called, if the model cannot be split.
        SMPRuntimeError: When called, if stages trace different steps or one is lost. StepUsageError before `smp.init`.
        TypeError: For an unknown option.
    """
    _reject_options(options)
    if not detach_outputs:
        warn_without_effect("smp.step(detach_outputs=False)", "nothing that a step returns has a gradient")
    if function is None:
        return lambda decorated: _decorate(decorated, non_split_inputs, input_split_axes or {}, options)
    return _decorate(function, non_split_inputs, input_split_axes or {}, options)


def _reject_options(options: Mapping[str, Any]) -> None:
    """Raises TypeError for unknown options and for `autograph`, and SMPUnsupportedError for `jit_compile=True`."""
    of_tensorflow = [name for name in keyword_names(tf.function) if name not in ("func", "autograph")]
    ours = ("non_split_inputs", "input_split_axes", "detach_outputs")
    refuse_unknown("smp.step", options, (*ours, *of_tensorflow))
    if options.get("jit_compile"):
        raise SMPUnsupportedError(
            "smp.step(jit_compile=True): XLA cannot send and receive. Fix: leave jit_compile out."
        )


def _decorate(
    function: Callable[..., Any], whole: Sequence[str], axes: Mapping[str, int], options: Mapping[str, Any]
) -> Callable[..., Any]:
    """Makes a tf.function that traces all microbatches. While tracing, the stages exchange lists of their messages.

    A call raises SMDDPError under XLA, and StepUsageError before `smp.init`.
    """
    splitter = TensorFlowSplitter(function, whole, axes)
    body = _convert_with_autograph(function)

    def trace_microbatches(*args: Any, **kwargs: Any) -> list[Any]:
        state.steps += 1
        graph = StepGraph(_stage_context(), state.steps)
        results = []
        for number, (its_args, its_kwargs) in enumerate(splitter.split(args, kwargs, state.cfg.microbatches)):
            with graph.microbatch(number):
                results.append(body(*its_args, **its_kwargs))
        graph.finish()
        return results

    trace_microbatches.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    trace_microbatches.__name__ = getattr(function, "__name__", "step")
    compiled = tf.function(trace_microbatches, autograph=False, **options)

    @functools.wraps(function)
    def run_step(*args: Any, **kwargs: Any) -> Any:
        state.require()
        reject_xla("A function under smp.step")
        return merge(compiled(*args, **kwargs))

    return tf.autograph.experimental.do_not_convert(run_step)  # type: ignore[no-any-return]


def _stage_context() -> StageContext:
    return StageContext(
        stage=state.stage,
        ranks=state.group("PP_GROUP"),
        gather=lambda mine: state.objects.gather(mine, state.group("PP_GROUP")),
        plan_call=plan_call,
        names=state.tensors.names,
        anchor=state.anchor,
        seed=state.seed,
        next_in_order=state.next_in_order,
        active=state.cfg.active_microbatches,
        simple=state.cfg.pipeline == "simple",
    )


def _convert_with_autograph(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function itself if autograph cannot convert it."""
    try:
        converted: Callable[..., Any] = tf.autograph.to_graph(function)
    except Exception:  # any reason: the function is traced unchanged
        return function
    return converted
