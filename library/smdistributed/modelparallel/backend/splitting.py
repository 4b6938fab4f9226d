"""Splits the arguments of a step into microbatches, and merges the microbatches' results. For any kind of tensor."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from smdistributed.modelparallel.backend.exceptions import MicrobatchError


class ArgumentSplitter(ABC):
    """Splits the arguments of one function into microbatches. A subclass handles the framework's tensors.

    `whole`: the names of arguments that every microbatch gets unsplit. `axes`: by name; default: 0. `uneven`: parts may
    differ in size by one. Raises MicrobatchError if a name is not an argument's.
    """

    may_be_uneven = True
    """Whether `uneven_microbatches` is supported."""

    def __init__(
        self, function: Callable[..., Any], whole: Sequence[str], axes: Mapping[str, int], uneven: bool = False
    ) -> None:
        self._signature = inspect.signature(function)
        unknown = [name for name in (*whole, *axes) if name not in self._signature.parameters]
        takes_any = any(p.kind is p.VAR_KEYWORD for p in self._signature.parameters.values())
        if unknown and not takes_any:
            raise MicrobatchError(
                f"smp.step of {function.__qualname__} names {', '.join(map(repr, unknown))}, which it does not take. "
                f"Fix: name its arguments, {', '.join(self._signature.parameters)}."
            )
        self._whole, self._axes, self.uneven = frozenset(whole), dict(axes), uneven

    @abstractmethod
    def is_tensor(self, value: Any) -> bool:
        """Whether this is a tensor of the framework."""

    @abstractmethod
    def shape(self, tensor: Any) -> tuple[int, ...]:
        """The sizes of its axes; empty for a scalar, which every microbatch gets whole."""

    @abstractmethod
    def cut(self, tensor: Any, count: int, axis: int) -> list[Any]:
        """Splits it into `count` parts. If `count` does not divide the axis, the first parts are one longer."""

    def split(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], count: int
    ) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Returns the arguments of each microbatch. Raises MicrobatchError if a tensor cannot be split by `count`."""
        names = self._names(len(args))
        positional = [self._parts(name, value, count) for name, value in zip(names, args)]
        named = {name: self._parts(name, value, count) for name, value in kwargs.items()}
        return [
            (tuple(parts[i] for parts in positional), {name: parts[i] for name, parts in named.items()})
            for i in range(count)
        ]

    def weights(self, parts: Sequence[tuple[tuple[Any, ...], dict[str, Any]]]) -> list[float]:
        """The share of each microbatch in the batch, by axis 0 of the first positional tensor; equal without one."""
        for place, value in enumerate(parts[0][0]):
            if self.is_tensor(value) and self.shape(value):
                sizes = [self.shape(args[place])[0] for args, _ in parts]
                return [size / sum(sizes) for size in sizes]
        return [1 / len(parts)] * len(parts)

    def _names(self, count: int) -> list[str]:
        names: list[str] = []
        for parameter in self._signature.parameters.values():
            if parameter.kind is parameter.VAR_POSITIONAL:
                return names + [parameter.name] * (count - len(names))
            names.append(parameter.name)
        return names

    def _parts(self, name: str, value: Any, count: int) -> list[Any]:
        if name in self._whole:
            return [value] * count
        return self._split(name, value, count, self._axes.get(name, 0))

    def _split(self, name: str, value: Any, count: int, axis: int) -> list[Any]:
        """Containers are split by item, and objects with `smp_slice` by that. Other values go whole into each part."""
        if self.is_tensor(value):
            return self._split_tensor(name, value, count, axis)
        if hasattr(value, "smp_slice"):
            return [value.smp_slice(count, i, axis) for i in range(count)]
        if isinstance(value, Mapping):
            parts = {key: self._split(f"{name}[{key!r}]", item, count, axis) for key, item in value.items()}
            return [like(value, {key: part[i] for key, part in parts.items()}) for i in range(count)]
        if isinstance(value, (list, tuple, set)):
            each = [self._split(f"{name}[{place}]", item, count, axis) for place, item in enumerate(value)]
            return [like(value, [part[i] for part in each]) for i in range(count)]
        return [value] * count

    def _split_tensor(self, name: str, value: Any, count: int, axis: int) -> list[Any]:
        """Raises MicrobatchError if a tensor lacks the axis or does not divide. Scalars go whole into each part."""
        shape = self.shape(value)
        if not shape:
            return [value] * count
        if not -len(shape) <= axis < len(shape):
            raise MicrobatchError(
                f"{name} has {len(shape)} axes: it cannot be split along axis {axis}. Fix: name another axis in "
                "input_split_axes."
            )
        size = shape[axis]
        if size < count or (size % count and not self.uneven):
            raise MicrobatchError(
                f"{name}, of shape {shape}, has {size} along axis {axis}: that must be a multiple of "
                f"'microbatches', {count}. Fix: choose another batch size, drop the last batch (drop_last=True), name "
                "the argument in non_split_inputs if it is not a batch"
                + (
                    "."
                    if self.uneven or not self.may_be_uneven
                    else ", or set 'uneven_microbatches' to true in mp_parameters."
                )
            )
        return self.cut(value, count, axis)


def like(value: Any, items: Any) -> Any:
    """Makes a container of the same type from other items; a dict or list if its constructor does not take them."""
    if hasattr(value, "_fields"):
        return type(value)(*items)
    try:
        return type(value)(items)
    except TypeError:  # a mapping with a constructor of its own
        return dict(items) if isinstance(value, Mapping) else list(items)


def merge(results: Sequence[Any], is_tensor: Callable[[Any], bool], output: Callable[[Sequence[Any]], Any]) -> Any:
    """Merges results of microbatches: one `output` in place of tensors, lists in place of other values."""
    first = results[0]
    if is_tensor(first):
        return output(results)
    if isinstance(first, Mapping) and all(isinstance(r, Mapping) and r.keys() == first.keys() for r in results):
        return like(first, {key: merge([r[key] for r in results], is_tensor, output) for key in first})
    if isinstance(first, (tuple, list)) and all(isinstance(r, (tuple, list)) and len(r) == len(first) for r in results):
        return like(first, [merge(items, is_tensor, output) for items in zip(*results)])
    return list(results)
