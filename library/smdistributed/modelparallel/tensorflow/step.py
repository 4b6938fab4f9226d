"""`smp.step`: turns a function into one graph that runs it for every microbatch, on all stages together."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from smdistributed.core.options import keyword_names, refuse_unknown, warn_without_effect
from smdistributed.core.tensorflow.operations import reject_xla
from smdistributed.modelparallel.backend import splitting
from smdistributed.modelparallel.backend.exceptions import SMPConfigError, SMPUnsupportedError
from smdistributed.modelparallel.tensorflow.model import plan_call
from smdistributed.modelparallel.tensorflow.state_mod import state
from smdistributed.modelparallel.tensorflow.step_graph import StageContext, StepGraph

_METHODS = ("variable", "add_n", "accumulate_n")


class StepOutput:
    """A result of a function under `smp.step`: one tensor, or tf.IndexedSlices, for each microbatch (AWS API).

    `outputs` lists them in the order of the microbatches.
    """

    def __init__(self, outputs: Sequence[Any]) -> None:
        self.outputs = list(outputs)

    def reduce_mean(self) -> Any:
        """Returns the mean of the outputs, in their shape; float32 if their dtype is an integer."""
        return _scaled(self.reduce_sum(), 1 / len(self.outputs))

    def reduce_sum(self) -> Any:
        """Returns the sum of the outputs, in their shape and dtype; tf.IndexedSlices are concatenated."""
        first = self.outputs[0]
        if isinstance(first, tf.IndexedSlices):
            values = tf.concat([output.values for output in self.outputs], 0)
            return tf.IndexedSlices(values, tf.concat([o.indices for o in self.outputs], 0), first.dense_shape)
        total = first  # one by one, so that each can be freed as soon as it is in the sum
        for output in self.outputs[1:]:
            total = total + output
        return total

    def accumulate(self, method: str = "variable", var: Any = None) -> Any:
        """Returns the mean of the outputs, as `reduce_mean`.

        Args:
            method: "variable", "add_n" or "accumulate_n": all give the same result.
            var: A variable to assign the mean to.

        Returns:
            The mean; with `var`, the result of the assignment.

        Raises:
            SMPConfigError: For another method.
        """
        if method not in _METHODS:
            raise SMPConfigError(
                f"accumulate(method={method!r}) is unknown. Allowed: {', '.join(map(repr, _METHODS))}. Fix: pass one "
                "of these."
            )
        mean = self.reduce_mean()
        return mean if var is None else var.assign(mean)

    def concat(self) -> Any:
        """Returns the outputs concatenated along axis 0; scalars become a vector."""
        return tf.concat([tf.reshape(o, [1]) if o.shape.rank == 0 else o for o in self.outputs], 0)

    def merge(self) -> Any:
        """Returns the whole batch, as `concat`."""
        return self.concat()

    def stack(self) -> Any:
        """Returns the outputs stacked along a new axis 0."""
        return tf.stack(self.outputs)

    def __repr__(self) -> str:
        return f"StepOutput({self.outputs!r})"


class TensorFlowSplitter(splitting.ArgumentSplitter):
    """Splits symbolic tensors. The size of an axis that is unknown is checked when the graph runs."""

    may_be_uneven = False

    def is_tensor(self, value: Any) -> bool:
        return bool(tf.is_tensor(value))

    def shape(self, tensor: Any) -> tuple[int, ...]:
        return tuple(tensor.shape)

    def cut(self, tensor: Any, count: int, axis: int) -> list[Any]:
        parts: list[Any] = tf.split(tensor, count, axis)
        return parts

    def _split_tensor(self, name: str, value: Any, count: int, axis: int) -> list[Any]:
        """Splits a tensor. If its size along the axis is unknown, the graph asserts that `count` divides it."""
        if value.shape.rank and -value.shape.rank <= axis < value.shape.rank and value.shape[axis] is None:
            complaint = f"{name} has a size along axis {axis} that is not a multiple of 'microbatches', {count}."
            with tf.control_dependencies([tf.debugging.assert_equal(tf.shape(value)[axis] % count, 0, complaint)]):
                return self.cut(tf.identity(value), count, axis)
        return super()._split_tensor(name, value, count, axis)


def merge(results: Sequence[Any]) -> Any:
    """Merges the results of all microbatches: tensors into StepOutputs, other values into lists."""
    return splitting.merge(results, tf.is_tensor, StepOutput)


def _scaled(tensor: Any, factor: float) -> Any:
    if isinstance(tensor, tf.IndexedSlices):
        return tf.IndexedSlices(_scaled(tensor.values, factor), tensor.indices, tensor.dense_shape)
    return tensor * tf.cast(factor, tensor.dtype) if tensor.dtype.is_floating else tf.cast(tensor, tf.float32) * factor


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
