"""Keeps torch.compile out of the collectives of a process group.

torch's C++ calls the methods of a process group that is written in Python. In a compiled region, for example when
DistributedDataParallel broadcasts its buffers, Dynamo would trace the method and fail at the C engine.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import CodeType
from typing import Any, TypeVar

import torch

_Class = TypeVar("_Class", bound=type)


def untraced(cls: _Class) -> _Class:
    """Makes Dynamo leave a class's public methods alone. `torch._dynamo.disable` would import Dynamo and be slower."""
    for name, method in list(vars(cls).items()):
        is_called = not name.startswith("_") or (not name.startswith("__") and hasattr(cls.__base__, name))
        if inspect.isfunction(method) and is_called:
            setattr(cls, name, without_dynamo(method))
    return cls


def without_dynamo(method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function so that Dynamo traces neither it nor the functions it calls; itself without Dynamo."""
    if _set_eval_frame is None:
        return method

    def call_untraced(*args: Any, **kwargs: Any) -> Any:
        callback = _set_eval_frame(None)
        try:
            return method(*args, **kwargs)
        finally:
            _set_eval_frame(callback)

    _skip(call_untraced.__code__)
    wrapper: Any = functools.wraps(method)(call_untraced)
    wrapper._torchdynamo_disable = True  # a compiled region that calls it is split here
    return wrapper  # type: ignore[no-any-return]


def _skip(code: CodeType) -> None:
    """Makes Dynamo run this code unchanged, as `torch._dynamo.skip` does; its C function has had two names."""
    if hasattr(_frames, "skip_code"):  # older versions of torch
        _frames.skip_code(code)
    else:
        strategy = _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.DEFAULT)
        _frames.set_code_exec_strategy(code, strategy)


_frames: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
_set_eval_frame: Any = getattr(_frames, "set_eval_frame", None)
