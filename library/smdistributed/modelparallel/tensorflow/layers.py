"""Calls of Keras layers, as somebody sees them who wants to know of them, or to answer them."""

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


class Observer(Protocol):
    """Who is asked about each call."""

    def call(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the call gives; `run` makes it."""


_observer: ContextVar[Observer | None] = ContextVar("smp_observer", default=None)
_pin: ContextVar[int | None] = ContextVar("smp_partition", default=None)


@contextmanager
def observed(observer: Observer | None) -> Iterator[None]:
    """Ask this observer about calls of layers; None: nobody."""
    token = _observer.set(observer)
    try:
        yield
    finally:
        _observer.reset(token)


@contextmanager
def pinned(stage: int) -> Iterator[None]:
    """Layers that are constructed, or called, in this context are on that stage."""
    token = _pin.set(stage)
    try:
        yield
    finally:
        _pin.reset(token)


def pin_of(layer: Any) -> int | None:
    """The stage on which the script has put a layer that is being called."""
    pin = _pin.get()
    return getattr(layer, "_smp_partition", None) if pin is None else pin


def run(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a layer as Keras does."""
    return _call(layer, *args, **kwargs)


def watch(outermost: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any], kind: type) -> None:
    """From now on ask observers about calls of layers; calls of layers of that kind, where there is no observer, are
    made by `outermost`."""

    @functools.wraps(_call)  # with its module, by which autograph knows that it is Keras' own
    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        observer = _observer.get()
        if observer is not None and not _is_keras_own(args, kwargs):
            return observer.call(self, args, kwargs)
        if observer is not None:
            with observed(None):
                return _call(self, *args, **kwargs)
        if isinstance(self, kind):
            return outermost(self, args, kwargs)
        return _call(self, *args, **kwargs)

    @functools.wraps(_construct)
    def constructed(self: Any, *args: Any, **kwargs: Any) -> None:
        _construct(self, *args, **kwargs)
        if _pin.get() is not None:
            object.__setattr__(self, "_smp_partition", _pin.get())

    _Layer.__call__, _Layer.__init__ = called, constructed


def _is_keras_own(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether Keras makes a functional model: a Sequential becomes one when it is called first."""
    return any(isinstance(value, tf.keras.__internal__.KerasTensor) for value in tf.nest.flatten((args, kwargs)))


class Whole:
    """Has every call made: there is nobody to ask."""

    def call(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return run(layer, args, kwargs)


def tensors_of(structure: Any) -> list[Any]:
    """The symbolic tensors in a structure, then their Keras masks."""
    tensors = [item for item in tf.nest.flatten(structure, expand_composites=True) if tf.is_tensor(item)]
    masks = [getattr(tensor, _MASK, None) for tensor in tensors]
    return tensors + [mask for mask in masks if mask is not None]


def masked(structure: Any) -> list[bool]:
    """Which of the tensors in a structure have a Keras mask."""
    tensors = [item for item in tf.nest.flatten(structure, expand_composites=True) if tf.is_tensor(item)]
    return [getattr(tensor, _MASK, None) is not None for tensor in tensors]


def with_tensors(structure: Any, tensors: Sequence[Any], have_masks: Sequence[bool] | None = None) -> Any:
    """A structure with other tensors, and masks, in the order of `tensors_of`. have_masks: which tensors had some when
    they were counted, because Keras may give them masks later."""
    flat = tf.nest.flatten(structure, expand_composites=True)
    places = [place for place, item in enumerate(flat) if tf.is_tensor(item)]
    masks = iter(tensors[len(places) :])
    for place, tensor, has_mask in zip(places, tensors, masked(structure) if have_masks is None else have_masks):
        if has_mask:
            setattr(tensor, _MASK, next(masks))
        flat[place] = tensor
    return tf.nest.pack_sequence_as(structure, flat, expand_composites=True)
