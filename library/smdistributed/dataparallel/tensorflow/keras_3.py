"""How an optimizer of Keras 3 reduces gradients over the ranks: in its method `apply`."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import tensorflow as tf


class ReducingApply:
    """Stands for the method `apply` of one optimizer: reduces the gradients, and then applies them.

    It is an attribute of the optimizer, which keeps its class: plain Keras loads saved models. With mixed precision, a
    LossScaleOptimizer reduces instead of its inner optimizer, before it looks for infinities. So all ranks skip the
    same steps.
    """

    def __init__(self, optimizer: Any, combined: Callable[[list[Any]], list[Any]], inner: Any = None) -> None:
        self._apply, self._inner, self._is_suspended = optimizer.apply, inner, False
        self.combined = combined

    def __call__(self, grads: Any, trainable_variables: Any = None) -> Any:
        if self._is_suspended:
            return self._apply(grads, trainable_variables)
        reduced = self.combined(list(grads))
        if self._inner is None:
            return self._apply(reduced, trainable_variables)
        self._inner._is_suspended = True
        try:
            return self._apply(reduced, trainable_variables)
        finally:
            self._inner._is_suspended = False


def reduces(optimizer: Any) -> bool:
    """Whether an optimizer of Keras 3 reduces gradients already."""
    return isinstance(getattr(optimizer, "apply", None), ReducingApply)


def reduce_before_apply(optimizer: Any, combined: Callable[[list[Any]], list[Any]]) -> None:
    """Makes an optimizer of Keras 3 apply what `combined` returns. Patches LossScaleOptimizer and Model of Keras."""
    _patch_loss_scale_optimizer()
    _patch_choice_of_xla()
    optimizer.apply = ReducingApply(optimizer, combined)


@cache
def _patch_loss_scale_optimizer() -> None:
    """Makes a LossScaleOptimizer reduce if its inner optimizer does. `Model.compile` makes one for float16."""
    kind = tf.keras.mixed_precision.LossScaleOptimizer
    real = kind.__init__

    @wraps(real)
    def initialize(self: Any, inner_optimizer: Any, *args: Any, **kwargs: Any) -> None:
        real(self, inner_optimizer, *args, **kwargs)
        if reduces(inner_optimizer):
            self.apply = ReducingApply(self, inner_optimizer.apply.combined, inner_optimizer.apply)

    kind.__init__ = initialize


@cache
def _patch_choice_of_xla() -> None:
    """Lets `Model.compile(jit_compile="auto")` choose no XLA, which cannot communicate. On GPUs it would."""
    real = getattr(tf.keras.Model, "_resolve_auto_jit_compile", None)
    if real is None:
        return

    @wraps(real)
    def choose(self: Any) -> bool:
        return not reduces(getattr(self, "optimizer", None)) and bool(real(self))

    tf.keras.Model._resolve_auto_jit_compile = choose
