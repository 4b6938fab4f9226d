"""Intercepts calls of Keras layers, so that an observer can record them or replace their outputs.

Also has `smp.partition`, and finds and replaces the tensors in nested structures, with their Keras masks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import tensorflow as tf

_Layer = tf.keras.layers.Layer
_MASK = "_keras_mask"
_call: Callable[..., Any] = _Layer.__call__
_construct: Callable[..., None] = _Layer.__init__


class CallObserver(Protocol):
    def call(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Called in place of a layer's call, with its arguments. Returns the outputs; `call_layer` can compute them."""


class CallUnchanged:
    """An observer that runs every layer as Keras does."""

    def call(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return call_layer(layer, args, kwargs)


_observer: ContextVar[CallObserver | None] = ContextVar("smp_observer", default=None)
_requested_stage: ContextVar[int | None] = ContextVar("smp_partition", default=None)


@contextmanager
def observe_calls(observer: CallObserver | None) -> Iterator[None]:
    """Passes calls of layers to an observer inside this context; None: to none."""
    token = _observer.set(observer)
    try:
        yield
    finally:
        _observer.reset(token)


@contextmanager
def partition(stage: int) -> Iterator[None]:
    """Puts layers on a stage that are constructed, or called, inside this context (AWS API).

    Args:
        stage: From 0 to `partitions` - 1; checked when the model is partitioned.
    """
    token = _requested_stage.set(stage)
    try:
        yield
    finally:
        _requested_stage.reset(token)


def requested_stage_of(layer: Any) -> int | None:
    """Returns the stage that the script requests for a layer that is being called; None: no request."""
    stage = _requested_stage.get()
    return getattr(layer, "_smp_partition", None) if stage is None else stage


def call_layer(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _call(layer, *args, **kwargs)


def intercept_calls(outermost: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any], kind: type) -> None:
    """Patches tf.keras.layers.Layer, so that calls go to the current observer, and new layers note `partition`.

    Without an observer, `outermost` handles calls of layers of class `kind`. While Keras builds a functional model,
    calls are Keras' own.
    """

    @functools.wraps(_call)  # with its module, by which autograph knows that it is Keras' own
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        observer = _observer.get()
        if observer is not None and not _builds_functional_model(args, kwargs):
            return observer.call(self, args, kwargs)
        if observer is not None:
            with observe_calls(None):
                return _call(self, *args, **kwargs)
        if isinstance(self, kind):
            return outermost(self, args, kwargs)
        return _call(self, *args, **kwargs)

    @functools.wraps(_construct)
    def construct(self: Any, *args: Any, **kwargs: Any) -> None:
        _construct(self, *args, **kwargs)
        if _requested_stage.get() is not None:
            object.__setattr__(self, "_smp_partition", _requested_stage.get())

    _Layer.__call__, _Layer.__init__ = call, construct


def _builds_functional_model(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether Keras builds a functional model: a Sequential becomes one in its first call."""
    return any(isinstance(value, tf.keras.__internal__.KerasTensor) for value in tf.nest.flatten((args, kwargs)))


def tensors_of(structure: Any) -> list[Any]:
    """Returns the symbolic tensors in a nested structure, followed by their Keras masks."""
    tensors = [item for item in tf.nest.flatten(structure, expand_composites=True) if tf.is_tensor(item)]
    masks = [getattr(tensor, _MASK, None) for tensor in tensors]
    return tensors + [mask for mask in masks if mask is not None]


def masked_tensors(structure: Any) -> list[bool]:
    """Returns for each tensor in a nested structure whether it has a Keras mask."""
    tensors = [item for item in tf.nest.flatten(structure, expand_composites=True) if tf.is_tensor(item)]
    return [getattr(tensor, _MASK, None) is not None for tensor in tensors]


def replace_tensors(structure: Any, tensors: Sequence[Any], masked: Sequence[bool] | None = None) -> Any:
    """Returns a copy of a nested structure with other tensors and masks, in the order of `tensors_of`.

    `masked`: `masked_tensors(structure)` when `tensors_of` was called: Keras may add masks later. Default: now.
    """
    flat = tf.nest.flatten(structure, expand_composites=True)
    places = [place for place, item in enumerate(flat) if tf.is_tensor(item)]
    masks = iter(tensors[len(places) :])
    for place, tensor, has_mask in zip(places, tensors, masked_tensors(structure) if masked is None else masked):
        if has_mask:
            setattr(tensor, _MASK, next(masks))
        flat[place] = tensor
    return tf.nest.pack_sequence_as(structure, flat, expand_composites=True)
