"""`smp.step`: a function that becomes a graph in which it is there once for each microbatch, on all stages together."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from smdistributed.core.options import keyword_names, refuse_unknown, warn_without_effect
from smdistributed.core.tensorflow.operations import refuse_xla
from smdistributed.modelparallel.backend.exceptions import SMPUnsupportedError
from smdistributed.modelparallel.tensorflow.model import follow
from smdistributed.modelparallel.tensorflow.splitting import Splitter, merge
from smdistributed.modelparallel.tensorflow.state_mod import state
from smdistributed.modelparallel.tensorflow.tracing import Place, StepGraph


def step(
    function: Callable[..., Any] | None = None,
    *,
    non_split_inputs: Sequence[str] = (),
    input_split_axes: Mapping[str, int] | None = None,
    detach_outputs: bool = True,
    **options: Any,
) -> Any:
    """Make a tf.function of a function, which runs once for each microbatch: forward and gradients go inside,
    `optimizer.apply_gradients` outside (AWS API).

    Tensors among the arguments, also inside lists, tuples, dicts and sets, are split along axis 0; objects with a
    method `smp_slice(num_mb, mb, axis)` split themselves. All ranks call the function, with the same batch on all
    stages of a replica, and all get what it returns: StepOutput in place of tensors, lists in place of anything else.

    non_split_inputs: names of arguments that every microbatch gets whole.
    input_split_axes: the axis along which an argument is split, by its name.
    detach_outputs: of the PyTorch interface; here nothing that is returned has a gradient, and False gets a warning.
    options: of tf.function, as `input_signature`.

    Raises MicrobatchError when an axis does not divide by the number of microbatches, SMPUnsupportedError for what
    cannot be cut and for `jit_compile=True`, TypeError for an argument that there is not.
    """
    _check(options)
    if not detach_outputs:
        warn_without_effect("smp.step(detach_outputs=False)", "nothing that a step returns has a gradient")
    if function is None:
        return lambda decorated: _decorate(decorated, non_split_inputs, input_split_axes or {}, options)
    return _decorate(function, non_split_inputs, input_split_axes or {}, options)


def _check(options: Mapping[str, Any]) -> None:
    of_tensorflow = [name for name in keyword_names(tf.function) if name not in ("func", "autograph")]
    ours = ("non_split_inputs", "input_split_axes", "detach_outputs")
    refuse_unknown("smp.step", options, (*ours, *of_tensorflow))
    if options.get("jit_compile"):
        raise SMPUnsupportedError("smp.step(jit_compile=True): XLA cannot send and receive. Leave jit_compile out.")


def _decorate(
    function: Callable[..., Any], whole: Sequence[str], axes: Mapping[str, int], options: Mapping[str, Any]
) -> Callable[..., Any]:
    splitter = Splitter(function, whole, axes)
    body = _converted(function)

    def traced(*args: Any, **kwargs: Any) -> list[Any]:
        state.steps += 1
        graph = StepGraph(_place(), state.steps)
        results = []
        for number, (its_args, its_kwargs) in enumerate(splitter.split(args, kwargs, state.cfg.microbatches)):
            with graph.microbatch(number):
                results.append(body(*its_args, **its_kwargs))
        graph.finish()
        return results

    traced.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    traced.__name__ = getattr(function, "__name__", "step")
    compiled = tf.function(traced, autograph=False, **options)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        state.require()
        refuse_xla("A function under smp.step")
        return merge(compiled(*args, **kwargs))

    return tf.autograph.experimental.do_not_convert(wrapper)  # type: ignore[no-any-return]


def _place() -> Place:
    return Place(
        stage=state.stage,
        ranks=state.group("PP_GROUP"),
        gather=lambda mine: state.objects.gather(mine, state.group("PP_GROUP")),
        follow=follow,
        names=state.messages.names,
        anchor=state.anchor,
        seed=state.seed,
        order=state.take_turn,
        active=state.cfg.active_microbatches,
        simple=state.cfg.pipeline == "simple",
    )


def _converted(function: Callable[..., Any]) -> Callable[..., Any]:
    """With Python's branches and loops over tensors as those of TensorFlow, where its source can be read."""
    try:
        converted: Callable[..., Any] = tf.autograph.to_graph(function)
    except Exception:  # whatever autograph finds wrong: then it is traced as it is
        return function
    return converted
