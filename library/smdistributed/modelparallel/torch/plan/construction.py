"""Construction of a model without memory, and casts of its parameters.

Inside `delay_param_initialization` parameters are on the meta device, and the calls that initialize them are recorded.
When the model is placed, each stage replays the calls for its own parameters: no rank ever holds the whole model. The
random numbers of a parameter depend on the seed and on its name, and not on the number of stages.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from smdistributed.modelparallel.backend.config import Config
from smdistributed.modelparallel.torch.pipeline.tasks import derive_seed
from smdistributed.modelparallel.torch.plan.trace import storage_address

_SMALL = 4096
"""Tensors with fewer elements are made at once: constructors read numbers from them, and they need little memory."""


@contextmanager
def delay_param_initialization(enabled: bool = True) -> Iterator[None]:
    """Delays the memory of large weights that are constructed inside `with` until the model is placed (AWS API 1.6).

    Its initial values differ from those that the same seed gives without this context.

    Args:
        enabled: False: do nothing.
    """
    if not enabled:
        yield
        return
    with _Recording():
        yield


class _RecordedCall(NamedTuple):
    """A recorded call of a torch function, with its result. Its tensors are others with the same storage."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any


class _Recording(TorchDispatchMode):
    """Makes large tensors on the meta device, and records every call that uses one."""

    def __init__(self, tape: list[_RecordedCall] | None = None, seed: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seed = torch.initial_seed() if seed is None else seed
        self._tape: list[_RecordedCall] = [] if tape is None else tape

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if any(argument.name == "device" for argument in func._schema.arguments) and not _meta_tensors((args, kwargs)):
            on_meta = func(*args, **{**kwargs, "device": torch.device("meta")})
            if math.prod(on_meta.shape) < _SMALL:
                return func(*args, **kwargs)
            result = on_meta
            if any(argument.name == "dtype" for argument in func._schema.arguments):
                kwargs["dtype"] = on_meta.dtype  # the default may be another one later
        else:
            result = func(*args, **kwargs)
        tensors = [*_meta_tensors((args, kwargs)), *_meta_tensors(result)]
        if tensors:
            self._tape.append(_RecordedCall(func, *_aliases((args, kwargs, result))))
            for tensor in tensors:
                _recipes[storage_address(tensor)] = self._tape, self._seed
        return result


_recipes: dict[int, tuple[list[_RecordedCall], int]] = {}
"""The recorded calls, and the seed, of every storage on the meta device."""


def dtype_of(config: Config) -> torch.dtype | None:
    """The dtype of the model's parameters and activations; None: as the script constructed it."""
    return torch.float16 if config.fp16 else torch.bfloat16 if config.bf16 else None


def cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Casts a tensor. If it is on the meta device, the cast is recorded, so that `materialize` can make the result."""
    recipe = _recipes.get(storage_address(tensor)) if tensor.is_meta else None
    if recipe is None:
        return tensor.to(dtype)
    with _Recording(*recipe):
        return tensor.to(dtype)


def materialize(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Replays a tensor's recorded calls on the CPU. The random numbers depend on `name`.

    Raises KeyError if the tensor was not made inside `delay_param_initialization`.
    """
    tape, seed = _recipes[storage_address(tensor)]
    made: dict[int, torch.Tensor] = {}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(derive_seed(seed, *name.encode()))
        for call in _required_calls(tape, storage_address(tensor)):
            args, kwargs = _replace_meta((call.args, call.kwargs), made)
            if "device" in kwargs:
                kwargs["device"] = torch.device("cpu")
            result = call.func(*args, **kwargs)
            for one, other in zip(_tensors(call.result), _tensors(result)):
                if one.is_meta:
                    made.setdefault(storage_address(one), other)
    return _replace_meta(tensor, made).clone()  # type: ignore[no-any-return]


def materialize_module(module: nn.Module, name: str) -> dict[nn.Parameter, nn.Parameter]:
    """Leaves children out. Returns the new parameters, by the parameters that they replace."""
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    for key, parameter in module._parameters.items():
        if parameter is not None and parameter.is_meta:
            values = materialize(parameter, f"{name}.{key}")
            replaced[parameter] = module._parameters[key] = nn.Parameter(values, parameter.requires_grad)
            vars(replaced[parameter]).update(vars(parameter))  # such as how it is split
    for key, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta:
            module._buffers[key] = materialize(buffer, f"{name}.{key}")
    return replaced


def _required_calls(tape: list[_RecordedCall], storage: int) -> list[_RecordedCall]:
    """The recorded calls, in order, on which the content of a storage depends."""
    required, calls = {storage}, []
    for call in reversed(tape):
        inputs, outputs, written = (
            set(map(storage_address, tensors))
            for tensors in (_meta_tensors((call.args, call.kwargs)), _meta_tensors(call.result), _written_tensors(call))
        )
        makes = (outputs - inputs) | (written if call.func._schema.is_mutable else set())
        if makes & required:
            calls.append(call)
            required |= inputs
    return calls[::-1]


def _written_tensors(call: _RecordedCall) -> Iterator[torch.Tensor]:
    """Yields the tensors on the meta device that a recorded call writes, in place or as `out`."""
    for argument, value in zip(call.func._schema.arguments, call.args):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from _meta_tensors(value)
    yield from _meta_tensors(call.kwargs.get("out"))


def _replace_meta(value: Any, made: dict[int, torch.Tensor]) -> Any:
    """Replaces meta tensors, in nested containers, by views of the tensors in `made`, by storage."""
    if isinstance(value, torch.Tensor) and value.is_meta:
        base = made[storage_address(value)]
        return torch.as_strided(base, value.shape, value.stride(), value.storage_offset())
    if isinstance(value, (tuple, list)):
        return type(value)(_replace_meta(item, made) for item in value)
    if isinstance(value, dict):
        return {key: _replace_meta(item, made) for key, item in value.items()}
    return value


def _aliases(value: Any) -> Any:
    """Replaces tensors by others with the same storage: a Parameter may get other storage, and the tape keeps this."""
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, (tuple, list)):
        return type(value)(_aliases(item) for item in value)
    if isinstance(value, dict):
        return {key: _aliases(item) for key, item in value.items()}
    return value


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors in nested tuples, lists and values of dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))


def _meta_tensors(value: Any) -> list[torch.Tensor]:
    tensors: Iterable[torch.Tensor] = _tensors(value)
    return [tensor for tensor in tensors if tensor.is_meta]
