"""What optimizers of Keras get besides: gradients by their version 1 names, those of all replicas, and what all stages
must agree on."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from smdistributed.core.tensorflow import operations
from smdistributed.modelparallel.tensorflow.state_mod import state
from smdistributed.modelparallel.tensorflow.tracing import current
from smdistributed.modelparallel.tensorflow.variables import is_staged

_Optimizer = tf.keras.optimizers.Optimizer
_Legacy = tf.keras.optimizers.legacy.Optimizer
_compute_gradients = _Optimizer.compute_gradients


def install() -> None:
    """Let optimizers know `get_gradients` and `compute_gradients` of tensors, which newer Keras has dropped and scripts
    for this library call; with replicas, let them apply the mean of all replicas' gradients; with stages, clip by the
    norm over all stages (`global_clipnorm`), and skip a step on all of them where one has infinite gradients."""
    if not hasattr(_Optimizer, "get_gradients"):
        _Optimizer.get_gradients = _get_gradients
        _Optimizer.compute_gradients = _compute_gradients_of_tensors
    if state.grid.size == 1:
        return
    tf.GradientTape.gradient = _anchored(tf.GradientTape.gradient)
    _Legacy.get_gradients = _get_gradients
    _Optimizer.aggregate_gradients = _together
    _Legacy._aggregate_gradients = _together
    tf.compat.v1.train.Optimizer.apply_gradients = _of_pairs(tf.compat.v1.train.Optimizer.apply_gradients)
    for kind in (_Optimizer, _Legacy):
        kind.apply_gradients = _of_stages_without(kind.apply_gradients)
    for kind in tf.keras.mixed_precision.LossScaleOptimizer.__subclasses__():  # of newer and of legacy optimizers
        kind.apply_gradients = _noting_inner(kind.apply_gradients)
    if state.cfg.partitions > 1:
        tf.clip_by_global_norm = _of_one_stage("tf.clip_by_global_norm", tf.clip_by_global_norm)
        tf.linalg.global_norm = _of_one_stage("tf.linalg.global_norm", tf.linalg.global_norm)


def _of_one_stage(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that cannot know which stage its tensors are of warns: each stage would scale by another norm."""

    @functools.wraps(function)
    def warns(*args: Any, **kwargs: Any) -> Any:
        warnings.warn(
            f"{name} has the norm of this stage's gradients, not of all: each stage would clip by another one. "
            "Fix: give the optimizer global_clipnorm=, which clips by the norm over all stages.",
            stacklevel=2,
        )
        return function(*args, **kwargs)

    return warns


def _of_pairs(apply: Callable[..., Any]) -> Callable[..., Any]:
    def apply_gradients(self: Any, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        return apply(self, _together(self, grads_and_vars), *args, **kwargs)

    return apply_gradients


def _of_stages_without(apply: Callable[..., Any]) -> Callable[..., Any]:
    """Keras does nothing where there is nothing to apply: the other stages would wait for this one's part."""

    @functools.wraps(apply)
    def apply_gradients(self: Any, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        pairs = list(grads_and_vars)
        if not pairs:
            _together(self, pairs)
        return apply(self, pairs, *args, **kwargs)

    return apply_gradients


def _noting_inner(apply: Callable[..., Any]) -> Callable[..., Any]:
    """An optimizer with a loss scale has another one apply, which is told that infinities matter."""

    def apply_gradients(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.inner_optimizer._smp_is_scaled = True
        return apply(self, *args, **kwargs)

    return apply_gradients


def _get_gradients(self: Any, loss: Any, params: Sequence[Any]) -> list[Any]:
    """The gradients of a tensor of a graph with respect to variables (Keras 2.3 API)."""
    has_scale = hasattr(self, "get_scaled_loss")
    variables = list(params)
    found = tf.gradients(self.get_scaled_loss(loss) if has_scale else loss, [*variables, *_anchors()])[: len(variables)]
    return list(self.get_unscaled_gradients(found) if has_scale else found)


def _anchors() -> list[Any]:
    """What is added to the variables whose gradients are asked for in a step: a stage that trains none of its own hands
    on the gradients of others all the same."""
    return [] if current() is None else [state.anchor]


def _anchored(gradient: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(gradient)
    def of_tape(self: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        return gradient(self, target, [sources, *_anchors()], *args, **kwargs)[0]

    return of_tape


def _compute_gradients_of_tensors(self: Any, loss: Any, var_list: Any, tape: Any = None) -> Any:
    """As Keras', and of a tensor of a graph without a tape (TensorFlow 1 API)."""
    if tape is not None or not tf.is_tensor(loss):
        return _compute_gradients(self, loss, var_list, tape)
    variables = var_list() if callable(var_list) else var_list
    return list(zip(_get_gradients(self, loss, variables), variables))


def _together(self: Any, grads_and_vars: Any) -> list[tuple[Any, Any]]:
    """Gradients that can be applied: the mean over the replicas, clipped by the norm over the stages."""
    pairs = list(grads_and_vars)
    mine = [place for place, (g, variable) in enumerate(pairs) if g is not None and is_staged(variable)]
    if pairs and not mine:  # of another model
        return pairs
    gradients = {place: tf.convert_to_tensor(pairs[place][0]) for place in mine}
    if state.replicas is not None:
        gradients = _averaged(gradients)
    limit = getattr(self, "global_clipnorm", None) or getattr(self, "_global_clipnorm", None)
    if state.cfg.partitions > 1 and (limit or getattr(self, "_smp_is_scaled", False)):
        gradients = _limited(gradients, limit)
    return [(gradients.get(place, gradient), variable) for place, (gradient, variable) in enumerate(pairs)]


def _averaged(gradients: dict[int, Any]) -> dict[int, Any]:
    found: dict[int, Any] = {}
    for dtype in sorted({tensor.dtype.name for tensor in gradients.values()}):
        places = [place for place, tensor in gradients.items() if tensor.dtype.name == dtype]
        found.update(zip(places, operations.all_reduce([gradients[place] for place in places], "avg")))
    return found


def _limited(gradients: dict[int, Any], limit: float | None) -> dict[int, Any]:
    """Scaled to a norm over all stages of `limit` at most; infinite where any stage's are."""
    squares = [tf.reduce_sum(tf.square(tf.cast(tensor, tf.float32))) for tensor in gradients.values()]
    norm = tf.sqrt(_sum_over_stages(tf.add_n(squares) if squares else tf.zeros([])))
    factor = tf.ones([]) if limit is None else limit / tf.maximum(norm, limit)
    factor = tf.where(tf.math.is_finite(norm), factor, float("nan"))
    return {place: tensor * tf.cast(factor, tensor.dtype) for place, tensor in gradients.items()}


def _sum_over_stages(scalar: Any) -> Any:
    """The sum of the stages' scalars. All stages of a pipeline call this, in the same order."""
    state.sums += 1
    label = f"sum/{state.sums}"
    others = [rank for rank in state.group("PP_GROUP") if rank != state.rank]
    state.messages.names[label] = "part of the norm of all gradients"
    with tf.control_dependencies(_operations(state.take_turn())):  # not while a step sends and receives
        tokens = [operations.send(scalar, rank, label) for rank in others]
    with tf.control_dependencies(tokens):
        parts = [operations.receive([scalar], tf.float32, rank, label) for rank in others]
    with tf.control_dependencies(parts):
        ended = state.take_turn()
    with tf.control_dependencies(_operations(ended)):
        return tf.add_n([scalar, *parts])


def _operations(found: Any) -> list[Any]:
    """Eager code has none: there is nothing to wait for."""
    return [] if tf.executing_eagerly() else [found]
