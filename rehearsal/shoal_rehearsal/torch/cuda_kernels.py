"""Kernels for the device "cuda" that make memory of the CPU, for code that the mode does not see.

Such code is inside of torch: in C++, or in Python that C++ calls, such as DTensor's. Its tensors have no placement
until the mode sees them.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from typing import Any

import torch

from shoal_rehearsal.torch.devices import CPU

# All other functions that create a tensor use these.
_FACTORIES = ("empty.memory_format", "empty_strided.default")
_registered: list[Any] = []  # a kernel is removed with its library


def patch(_: int) -> None:
    """Registers the kernels. They replace CUDA's kernels, if this build of torch has them."""
    make_library: Any = torch.library.Library
    library = make_library("aten", "IMPL")
    for name in _FACTORIES:
        packet, overload = name.split(".")
        create = getattr(getattr(torch.ops.aten, packet), overload)
        override = {"allow_override": True} if "allow_override" in inspect.signature(library.impl).parameters else {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch 2.0 warns that there was another kernel
            library.impl(name.replace(".default", ""), _on_cpu(create), "CUDA", **override)
    _registered.append(library)


def _on_cpu(create: Any) -> Any:
    @functools.wraps(create)
    def created(*args: Any, **kwargs: Any) -> torch.Tensor:
        with torch._C.DisableTorchFunction():
            return create(*args, **{**kwargs, "device": CPU, "pin_memory": False})  # type: ignore[no-any-return]

    return created
