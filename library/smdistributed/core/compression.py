"""Whether gradient compression pays: compares steps with and without it, for PyTorch and TensorFlow."""

from __future__ import annotations

import logging
import time
import warnings
from statistics import median

WARM_STEPS, COMPARED_STEPS = 3, 5
"""Of each kind, without and with compression. Frameworks arrange their buckets again in the first."""

_log = logging.getLogger(__name__)


class CompressionTrial:
    """Switches compression on and off while it measures steps. Then it decides, once.

    Args:
        method: Its name, for messages.
        measure: If False, compression stays on.
    """

    def __init__(self, method: str, measure: bool = True) -> None:
        self._method = method
        self._is_on: bool | None = None if measure else True
        self._step = -1
        self._began = 0.0
        self._times: dict[bool, list[float]] = {False: [], True: []}

    @property
    def is_measuring(self) -> bool:
        return self._is_on is None

    def compresses(self) -> bool:
        """Whether this step is compressed: the steps to warm up are apart, those to compare take turns."""
        if self._is_on is not None:
            return self._is_on
        if self._step < 2 * WARM_STEPS:
            return self._step >= WARM_STEPS
        return bool(self._step % 2)

    def begin_step(self) -> list[float] | None:
        """Notes how long the last step took, between their first buckets. Call it at each step's first bucket.

        Returns:
            After the last compared step, the medians without and with compression, in seconds. All ranks then call
            `decide` with the largest of their medians.
        """
        now = time.perf_counter()
        if self._step >= 2 * WARM_STEPS:
            self._times[self.compresses()].append(now - self._began)
        self._step += 1
        self._began = now
        if self._step < 2 * (WARM_STEPS + COMPARED_STEPS):
            return None
        return [median(self._times[False]), median(self._times[True])]

    def decide(self, without: float, compressed: float, rank: int) -> None:
        """Switches compression on or off, by the seconds of a step on the slowest rank. Rank 0 warns if it is off."""
        self._is_on = compressed < without
        times = f"a step takes {compressed:.4g} s with it and {without:.4g} s without"
        if self._is_on:
            _log.info("Gradient compression %s is on: %s.", self._method, times)
        else:
            warn_that_it_is_off(f"{self._method} is off from now on: {times}", rank)


def warn_that_it_is_off(what: str, rank: int) -> None:
    """Warns (UserWarning) on rank 0."""
    if rank == 0:
        warnings.warn(f"Gradient compression {what}.", stacklevel=3)


def reason_without_network(engine: str) -> str:
    """Says why int8 has nothing to do with this communication engine: only messages between hosts are compressed."""
    return "all ranks share the memory of one host" if engine.startswith("shm:") else ""
