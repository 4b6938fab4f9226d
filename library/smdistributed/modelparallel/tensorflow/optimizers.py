"""Patches Keras' optimizers: version 1 methods, gradients averaged over replicas, and decisions of all stages.

Also patches optimizers of TensorFlow 1, tf.GradientTape, and TensorFlow's global norm and its clipping.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from smdistributed.core.tensorflow import operations
from smdistributed.modelparallel.tensorflow.stage_variables import is_of_distributed_model
from smdistributed.modelparallel.tensorflow.state_mod import state
from smdistributed.modelparallel.tensorflow.step_graph import current_step

_Optimizer = tf.keras.optimizers.Optimizer
_Legacy = tf.keras.optimizers.legacy.Optimizer
_compute_gradients = _Optimizer.compute_gradients


def patch_optimizers() -> None:
    """Patches optimizers of Keras and TensorFlow 1, tf.GradientTape and tf.clip_by_global_norm for the job of `state`.

    Optimizers get `get_gradients` and `compute_gradients` for tensors, which newer versions of Keras lack and published
    scripts call. With one rank, that is all. With replicas, they apply the mean of all replicas' gradients. With
    stages, `global_clipnorm` clips by the norm over all stages. With it or a loss scale, all stages skip a step if one
    of them has infinite gradients. tf.clip_by_global_norm and tf.linalg.global_norm then warn.
    """
    if not hasattr(_Optimizer, "get_gradients"):
        _Optimizer.get_gradients = _get_gradients
        _Optimizer.compute_gradients = _compute_gradients_of_tensors
    if state.grid.size == 1:
        return
    tf.GradientTape.gradient = _with_anchors(tf.GradientTape.gradient)
    _Legacy.get_gradients = _get_gradients
    _Optimizer.aggregate_gradients = _combine_gradients
    _Legacy._aggregate_gradients = _combine_gradients
    tf.compat.v1.train.Optimizer.apply_gradients = _combine_before(tf.compat.v1.train.Optimizer.apply_gradients)
    for kind in (_Optimizer, _Legacy):
        kind.apply_gradients = _combine_if_empty(kind.apply_gradients)
    for kind in tf.keras.mixed_precision.LossScaleOptimizer.__subclasses__():  # of newer and of legacy optimizers
        kind.apply_gradients = _mark_inner_optimizer(kind.apply_gradients)
    if state.cfg.partitions > 1:
        tf.clip_by_global_norm = _warn_of_local_norm("tf.clip_by_global_norm", tf.clip_by_global_norm)
        tf.linalg.global_norm = _warn_of_local_norm("tf.linalg.global_norm", tf.linalg.global_norm)


def _warn_of_local_norm(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def warns(*args: Any, **kwargs: Any) -> Any:
        warnings.warn(
            f"{name} has the norm of this stage's gradients, not of all: each stage would clip by another one. "
            "Fix: give the optimizer global_clipnorm=, which clips by the norm over all stages.",
            stacklevel=2,
        )
        return function(*args, **kwargs)

    return warns


def _combine_before(apply: Callable[..., Any]) -> Callable[..., Any]:
    def apply_gradients(self: Any, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        return apply(self, _combine_gradients(self, grads_and_vars), *args, **kwargs)

    return apply_gradients


def _combine_if_empty(apply: Callable[..., Any]) -> Callable[..., Any]:
    """Without gradients, calls `_combine_gradients`, where other stages wait for this one: Keras then does not."""

    @functools.wraps(apply)
    def apply_gradients(self: Any, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        pairs = list(grads_and_vars)
        if not pairs:
            _combine_gradients(self, pairs)
        return apply(self, pairs, *args, **kwargs)

    return apply_gradients


def _mark_inner_optimizer(apply: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `apply_gradients` of an optimizer with a loss scale: marks the inner one, to look for infinities."""

    def apply_gradients(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.inner_optimizer._smp_is_scaled = True
        return apply(self, *args, **kwargs)

    return apply_gradients


def _get_gradients(self: Any, loss: Any, params: Sequence[Any]) -> list[Any]:
    """With a loss scale, the loss is scaled and the gradients are unscaled (Keras 2.3 API)."""
    has_scale = hasattr(self, "get_scaled_loss")
    variables = list(params)
    found = tf.gradients(self.get_scaled_loss(loss) if has_scale else loss, [*variables, *_anchors()])[: len(variables)]
    return list(self.get_unscaled_gradients(found) if has_scale else found)


def _anchors() -> list[Any]:
    """Returns sources to add to every gradient in a step, so that a stage without trainable variables passes it on."""
    return [] if current_step() is None else [state.anchor]


def _with_anchors(gradient: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps GradientTape.gradient: in a step the anchor is one more source. Its gradient is left out of the result."""

    @functools.wraps(gradient)
    def of_tape(self: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        return gradient(self, target, [sources, *_anchors()], *args, **kwargs)[0]

    return of_tape


def _compute_gradients_of_tensors(self: Any, loss: Any, var_list: Any, tape: Any = None) -> Any:
    """Extends Keras' method: takes a symbolic tensor without a tape (TensorFlow 1 API)."""
    if tape is not None or not tf.is_tensor(loss):
        return _compute_gradients(self, loss, var_list, tape)
    variables = var_list() if callable(var_list) else var_list
    return list(zip(_get_gradients(self, loss, variables), variables))


def _combine_gradients(self: Any, grads_and_vars: Any) -> list[tuple[Any, Any]]:
    """Returns means over replicas, clipped by the norm over stages if there is a `global_clipnorm`; all ranks call it.

    With that or a loss scale, all are NaN if one of any stage is not finite, so that all stages skip the step.
    """
    pairs = list(grads_and_vars)
    mine = [place for place, (g, variable) in enumerate(pairs) if g is not None and is_of_distributed_model(variable)]
    if pairs and not mine:  # the gradients of another model
        return pairs
    gradients = {place: tf.convert_to_tensor(pairs[place][0]) for place in mine}
    if state.replicas is not None:
        gradients = _average_over_replicas(gradients)
    limit = getattr(self, "global_clipnorm", None) or getattr(self, "_global_clipnorm", None)
    if state.cfg.partitions > 1 and (limit or getattr(self, "_smp_is_scaled", False)):
        gradients = _clip_over_stages(gradients, limit)
    return [(gradients.get(place, gradient), variable) for place, (gradient, variable) in enumerate(pairs)]


def _average_over_replicas(gradients: dict[int, Any]) -> dict[int, Any]:
    """Returns the means of gradients over the replicas, which all call it; one collective for each dtype."""
    found: dict[int, Any] = {}
    for dtype in sorted({tensor.dtype.name for tensor in gradients.values()}):
        places = [place for place, tensor in gradients.items() if tensor.dtype.name == dtype]
        found.update(zip(places, operations.all_reduce([gradients[place] for place in places], "avg")))
    return found


def _clip_over_stages(gradients: dict[int, Any], limit: float | None) -> dict[int, Any]:
    """Scales to a norm over all stages of at most `limit`; NaN if any are not finite. All stages call it."""
    squares = [tf.reduce_sum(tf.square(tf.cast(tensor, tf.float32))) for tensor in gradients.values()]
    norm = tf.sqrt(_sum_over_stages(tf.add_n(squares) if squares else tf.zeros([])))
    factor = tf.ones([]) if limit is None else limit / tf.maximum(norm, limit)
    factor = tf.where(tf.math.is_finite(norm), factor, float("nan"))
    return {place: tensor * tf.cast(factor, tensor.dtype) for place, tensor in gradients.items()}


def _sum_over_stages(scalar: Any) -> Any:
    """All stages of a pipeline call this, in the same order: its messages come between two steps."""
    state.sums += 1
    label = f"sum/{state.sums}"
    others = [rank for rank in state.group("PP_GROUP") if rank != state.rank]
    state.tensors.names[label] = "part of the norm of all gradients"
    with tf.control_dependencies(_control_inputs(state.next_in_order())):  # not while a step sends and receives
        tokens = [operations.send(scalar, rank, label) for rank in others]
    with tf.control_dependencies(tokens):
        parts = [operations.receive([scalar], tf.float32, rank, label) for rank in others]
    with tf.control_dependencies(parts):
        ended = state.next_in_order()
    with tf.control_dependencies(_control_inputs(ended)):
        return tf.add_n([scalar, *parts])


def _control_inputs(found: Any) -> list[Any]:
    return [] if tf.executing_eagerly() else [found]
