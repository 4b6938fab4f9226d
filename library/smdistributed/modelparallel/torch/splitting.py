"""How a step's arguments become those of its microbatches, and what they return one object."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from smdistributed.modelparallel.backend.exceptions import MicrobatchError


class StepOutput:
    """What a function under `smp.step` returned: a tensor for each microbatch (AWS API).

    `outputs` is the list of them, in the order of the microbatches.
    """

    def __init__(self, outputs: Sequence[torch.Tensor]) -> None:
        self.outputs = list(outputs)

    def reduce_sum(self) -> torch.Tensor:
        """Their sum, of the shape of each."""
        return torch.stack(self.outputs).sum(0)

    def reduce_mean(self) -> torch.Tensor:
        """Their mean, of the shape of each."""
        return torch.stack(self.outputs).mean(0)

    def concat(self) -> torch.Tensor:
        """All, one after the other along axis 0; scalars as a vector."""
        return torch.cat([output.reshape(1) if output.dim() == 0 else output for output in self.outputs])

    def stack(self) -> torch.Tensor:
        """All, along a new axis 0."""
        return torch.stack(self.outputs)

    def detach(self) -> StepOutput:
        """The same values without a graph; transformers' Trainer asks for it."""
        return StepOutput([output.detach() for output in self.outputs])

    def __repr__(self) -> str:
        return f"StepOutput({self.outputs!r})"


class Splitter:
    """Splits the arguments of one function into microbatches.

    whole: names of arguments that every microbatch gets as they are. axes: along which axis an argument is split, by
    its name; else 0. uneven: whether parts may differ in size, by one at most.
    """

    def __init__(
        self, function: Callable[..., Any], whole: Sequence[str], axes: Mapping[str, int], uneven: bool = False
    ) -> None:
        self._signature = inspect.signature(function)
        unknown = [name for name in (*whole, *axes) if name not in self._signature.parameters]
        takes_any = any(p.kind is p.VAR_KEYWORD for p in self._signature.parameters.values())
        if unknown and not takes_any:
            raise MicrobatchError(
                f"smp.step of {function.__qualname__} names {', '.join(map(repr, unknown))}, which it does not take: "
                f"its arguments are {', '.join(self._signature.parameters)}."
            )
        self._whole, self._axes, self.uneven = frozenset(whole), dict(axes), uneven

    def split(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], count: int
    ) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        """The arguments of each of `count` microbatches.

        Raises MicrobatchError when an axis does not divide by `count`.
        """
        names = self._names(len(args))
        positional = [self._parts(name, value, count) for name, value in zip(names, args)]
        named = {name: self._parts(name, value, count) for name, value in kwargs.items()}
        return [
            (tuple(parts[i] for parts in positional), {name: parts[i] for name, parts in named.items()})
            for i in range(count)
        ]

    @staticmethod
    def weights(parts: Sequence[tuple[tuple[Any, ...], dict[str, Any]]]) -> list[float]:
        """The share of each microbatch in the batch, by the length of the first tensor that was split."""
        for place, value in enumerate(parts[0][0]):
            if isinstance(value, torch.Tensor) and value.dim():
                sizes = [args[place].size(0) for args, _ in parts]
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
        if isinstance(value, torch.Tensor):
            return self._split_tensor(name, value, count, axis)
        if hasattr(value, "smp_slice"):
            return [value.smp_slice(count, i, axis) for i in range(count)]
        if isinstance(value, Mapping):
            parts = {key: self._split(f"{name}[{key!r}]", item, count, axis) for key, item in value.items()}
            return [_like(value, {key: part[i] for key, part in parts.items()}) for i in range(count)]
        if isinstance(value, (list, tuple, set)):
            each = [self._split(f"{name}[{place}]", item, count, axis) for place, item in enumerate(value)]
            return [_like(value, [part[i] for part in each]) for i in range(count)]
        return [value] * count

    def _split_tensor(self, name: str, value: torch.Tensor, count: int, axis: int) -> list[torch.Tensor]:
        if value.dim() == 0:
            return [value] * count
        if not -value.dim() <= axis < value.dim():
            raise MicrobatchError(f"{name} has {value.dim()} axes: it cannot be split along axis {axis}.")
        size = value.size(axis)
        if size < count or (size % count and not self.uneven):
            raise MicrobatchError(
                f"{name}, of shape {tuple(value.shape)}, has {size} along axis {axis}: that must be a multiple of "
                f"'microbatches', {count}. Choose another batch size, drop the last batch (drop_last=True), name the "
                "argument in non_split_inputs if it is no batch"
                + ("." if self.uneven else ", or set 'uneven_microbatches' to true in mp_parameters.")
            )
        return list(torch.tensor_split(value, count, axis))


def _like(value: Any, items: Any) -> Any:
    """A container of the kind of `value`, with these items."""
    if hasattr(value, "_fields"):
        return type(value)(*items)
    try:
        return type(value)(items)
    except TypeError:  # a mapping with a constructor of its own
        return dict(items) if isinstance(value, Mapping) else list(items)


def merge(results: Sequence[Any]) -> Any:
    """What the microbatches returned as one: StepOutput in place of tensors, lists in place of anything else."""
    first = results[0]
    if isinstance(first, torch.Tensor):
        return StepOutput(results)
    if isinstance(first, Mapping) and all(isinstance(r, Mapping) and r.keys() == first.keys() for r in results):
        return _like(first, {key: merge([result[key] for result in results]) for key in first})
    if isinstance(first, (tuple, list)) and all(isinstance(r, (tuple, list)) and len(r) == len(first) for r in results):
        return _like(first, [merge(items) for items in zip(*results)])
    return list(results)


def detach(result: Any) -> Any:
    """`result` with tensors that have no graph."""
    if isinstance(result, torch.Tensor):
        return result.detach()
    if isinstance(result, Mapping):
        return _like(result, {key: detach(item) for key, item in result.items()})
    if isinstance(result, (tuple, list)):
        return _like(result, [detach(item) for item in result])
    return result
