"""Writes checkpoints one after the other, in a background thread if asked to, from copies that it keeps."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

Tensors = dict[str, torch.Tensor]


class Writer:
    """Calls a function with tensors that do not change while it runs.

    In the background, it uses its own copies on the CPU. Their memory is used again for the next ones.
    """

    def __init__(self, in_background: bool) -> None:
        self._thread = ThreadPoolExecutor(1, "shoal-checkpoint") if in_background else None
        self._running: Future[None] | None = None
        self._copies: Tensors = {}

    def write(self, tensors: Tensors, function: Callable[[Tensors], None]) -> None:
        """Calls the function; in the background, returns when the tensors are copied. Waits for the call before.

        Raises:
            Exception: The error of this call, or of the one before in the background.
        """
        self.wait()
        if self._thread is None:
            function(tensors)
            return
        self._copies = {name: self._copy(name, tensor) for name, tensor in tensors.items()}
        if any(tensor.is_cuda for tensor in tensors.values()):
            torch.cuda.synchronize()
        self._running = self._thread.submit(function, self._copies)

    def _copy(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        copy = self._copies.get(name)
        if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        return copy.copy_(tensor, non_blocking=True)

    def wait(self) -> None:
        """Waits until nothing is written.

        Raises:
            Exception: The error of the call in the background.
        """
        running, self._running = self._running, None
        if running is not None:
            running.result()
