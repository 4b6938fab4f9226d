"""Operations in float16 for which the CPU has no kernel, before about torch 2.2: computed in float32, and rounded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

_MISSING = "not implemented for 'Half'"


def _has_half() -> bool:
    """Whether the CPU computes layers in float16 (since about torch 2.2)."""
    try:
        torch.nn.functional.conv1d(torch.ones(1, 1, 1).half(), torch.ones(1, 1, 1).half())
        torch.nn.functional.linear(torch.ones(1, 1).half(), torch.ones(1, 1).half())
    except RuntimeError:
        return False
    return True


HAS_HALF = _has_half()
"""Found when this module is imported: with the rehearsal's mode, layers work in float16 in any case."""


def lacks_kernel(error: RuntimeError) -> bool:
    """Whether an operation failed because the CPU has no kernel for float16."""
    return _MISSING in str(error)


class SinglePrecision(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Computes operations in float32 inside `with`, also in a backward pass, if float16 has no kernel."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Calls an operation. Raises its error if it is another than the missing kernel."""
        given = (args, kwargs or {})
        try:
            return func(*args, **given[1])
        except RuntimeError as error:
            if not lacks_kernel(error):
                raise
        copies: dict[int, torch.Tensor] = {}
        wide = tree_map(lambda value: _widen(value, copies), given)
        result = func(*wide[0], **wide[1])
        written = {id(copies[id(half)]): half for half in _written(func, *given) if id(half) in copies}
        for half in written.values():
            half.copy_(copies[id(half)])
        dtypes = _result_dtypes(func, given, result)
        return tree_map(lambda value: written.get(id(value), _narrow(value, dtypes)), result)


def _widen(value: Any, copies: dict[int, torch.Tensor]) -> Any:
    if value is torch.float16:
        return torch.float32
    if not isinstance(value, torch.Tensor) or value.dtype is not torch.float16:
        return value
    return copies.setdefault(id(value), value.float())


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """Yields the tensors that an operation writes, in place or as `out`."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            yield from (item for item in tree_flatten(value)[0] if isinstance(item, torch.Tensor))


def _result_dtypes(func: Any, given: Any, result: Any) -> dict[int, torch.dtype]:
    """Returns the dtype that each result has with arguments in float16, by its id; none if torch cannot say."""
    try:
        args, kwargs = tree_map(lambda value: value.to("meta") if isinstance(value, torch.Tensor) else value, given)
        expected = tree_flatten(func(*args, **kwargs))[0]
    except (RuntimeError, NotImplementedError):  # an operation without shapes on the meta device
        return {}
    pairs = zip(tree_flatten(result)[0], expected)
    return {id(one): other.dtype for one, other in pairs if isinstance(other, torch.Tensor)}


def _narrow(value: Any, dtypes: dict[int, torch.dtype]) -> Any:
    if not isinstance(value, torch.Tensor) or value.dtype is not torch.float32:
        return value
    return value.to(dtypes.get(id(value), torch.float16))
