"""Sees every call of torch's functions: gives them the CPU where CUDA is asked for, and keeps track of who is where.

By torch's own override mechanism, a TorchFunctionMode, which stays entered in this thread and those it starts. Torch
leaves a mode while it handles a function: what runs inside then sees CPU tensors, as they are.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _device

from shoal_rehearsal.torch import devices
from shoal_rehearsal.torch.answers import ANSWERS, asked_and_given
from shoal_rehearsal.torch.devices import CPU, UNKNOWN
from shoal_rehearsal.torch.mixing import refuse_mixture
from shoal_rehearsal.torch.places import Place, common_place, inherit, put, tensors_in


class Rehearsal(TorchFunctionMode):
    """The mode itself."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call `func` for the script."""
        answer = ANSWERS.get(func)
        if answer is not None:
            return answer(self, *args, **(kwargs or {}))
        words, options = list(args), dict(kwargs or {})
        tensors = list(tensors_in((*words, *options.values())))
        refuse_mixture(func, tensors)
        asked = _to_cpu(words, options) or _default(func, tensors, options)
        result = func(*words, **options)
        if asked is None:
            inherit(result, common_place(tensors))
        else:
            put(result, None if asked is UNKNOWN else asked)
        return result


def _to_cpu(words: list[Any], options: dict[str, Any]) -> Place:
    """Return the device that a call's arguments ask for, None for none, and put the CPU into CUDA's place."""
    asked: Place = None
    for index, word in enumerate(words):
        if isinstance(word, torch.device) or devices.is_cuda(word):
            asked, words[index] = asked_and_given(word)
    if options.get("device") is not None:
        asked, options["device"] = asked_and_given(options["device"])
    return asked


def _default(func: Any, tensors: list[torch.Tensor], options: dict[str, Any]) -> Place:
    """Return where a new tensor is that is not asked for on a device: by torch.set_default_device, else on the CPU."""
    if func not in _device._device_constructors() or options.get("device") is not None:
        return None
    default: Place = getattr(_device, "CURRENT_DEVICE", None)  # torch 2.0 has its own mode above ours, and none such
    if default is not None and default.type == "cuda":
        options["device"] = CPU
        return devices.cuda(default)
    return CPU if default is None and not tensors else None


def stand_in(_: int) -> None:
    """Enter the mode here, and in every thread that is started from now on."""
    mode: Any = Rehearsal()
    mode.__enter__()
    thread_class: Any = threading.Thread
    variable: Any = torch.autograd.Variable
    start = thread_class.start

    @functools.wraps(start)
    def start_rehearsing(thread: threading.Thread) -> None:
        if torch._C._is_torch_function_mode_enabled():  # not for a thread of what works on the tensors as they are
            thread.run = _under(mode, thread.run)  # type: ignore[method-assign]
        start(thread)

    thread_class.start = start_rehearsing
    variable._execution_engine = _Engine(mode, variable._execution_engine)


class _Engine:
    """Autograd's engine, which calls the script's own functions while torch handles a backward: they see the mode."""

    def __init__(self, mode: Rehearsal, engine: Any) -> None:
        self._mode = mode
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        """See torch.autograd.backward."""
        with contextlib.nullcontext() if _is_entered() else self._mode:
            return self._engine.run_backward(*args, **kwargs)


def _is_entered() -> bool:
    stack = range(torch._C._len_torch_function_stack())
    return any(isinstance(torch._C._get_function_stack_at(index), Rehearsal) for index in stack)


def _under(mode: TorchFunctionMode, run: Callable[[], None]) -> Callable[[], None]:
    def run_rehearsing() -> None:
        with mode:
            run()

    return run_rehearsing
