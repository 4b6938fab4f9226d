"""The modes that torch keeps for each thread (grad, autocast), and that a call to another stage takes along."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ThreadModes:
    """grad: whether gradients are computed. autocast: pairs of a device type and the dtype that autocast uses there."""

    grad: bool
    autocast: tuple[tuple[str, torch.dtype], ...]

    @classmethod
    def current(cls) -> ThreadModes:
        """Returns the modes of this thread: whether grad is enabled, and autocast's device types and dtypes."""
        autocast = []
        if torch.is_autocast_enabled():
            autocast.append(("cuda", torch.get_autocast_gpu_dtype()))
        if torch.is_autocast_cpu_enabled():
            autocast.append(("cpu", torch.get_autocast_cpu_dtype()))
        return cls(torch.is_grad_enabled(), tuple(autocast))

    @contextmanager
    def apply(self) -> Iterator[None]:
        """Sets these modes on this thread inside `with`.

        Autocast for device types that these modes do not name stays as it is.
        """
        with torch.set_grad_enabled(self.grad), ExitStack() as stack:
            for device, dtype in self.autocast:
                stack.enter_context(torch.autocast(device, dtype=dtype))
            yield
