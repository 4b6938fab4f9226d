"""Where the ranks of one host wait for each other: a barrier in shared memory.

Each rank counts its arrivals in a cache line of its own, and wakes who waits for it; the kernel's futex lets go of the
interpreter while it waits. A rank that waits looks now and then whether the others still live.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import time
from collections.abc import Sequence
from mmap import mmap

from smdistributed.core.segment import Process

LINE_BYTES = 64
_SYSCALL = {"x86_64": 202}  # futex; elsewhere stores may become visible in another order than they were made
_WAIT, _WAKE, _EVERYBODY = 0, 1, 2**31 - 1
_LOOK_SECONDS = 0.25
_SPINS = 50  # looks before a rank sleeps; where each has a core of its own, the others are that close


class LostRankError(RuntimeError):
    """A rank of this host has ended, or has not come in time, while the others wait for it."""


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def is_supported() -> bool:
    """Whether ranks can meet on this machine."""
    return platform.system() == "Linux" and platform.machine() in _SYSCALL


class Meeting:
    """A barrier of `len(processes)` ranks, in the first lines of their shared memory."""

    def __init__(self, memory: mmap, rank: int, processes: Sequence[Process], seconds: float) -> None:
        self._counts = memoryview(memory)[: LINE_BYTES * len(processes)].cast("I")
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._processes = processes
        self._rank = rank
        self._others = [other for other in range(len(processes)) if other != rank]
        self.seconds = seconds
        self._turn = 0
        self._syscall = ctypes.CDLL(None, use_errno=True).syscall
        self._number = _SYSCALL[platform.machine()]
        self._spins = _SPINS if len(os.sched_getaffinity(0)) >= len(processes) else 0
        self._pause = _Timespec(0, int(_LOOK_SECONDS * 1e9))

    def wait(self) -> None:
        """Wait until every rank is here. Raises LostRankError, naming those who are not, when they will not come."""
        self._turn = (self._turn + 1) & 0xFFFFFFFF
        self._counts[self._rank * (LINE_BYTES // 4)] = self._turn
        self._futex(self._rank, _WAKE, _EVERYBODY)
        for other in self._others:
            if not self._is_here(other):
                self._await(other)

    def _is_here(self, rank: int) -> bool:
        """Whether a rank has come as often as this one, or once more; the counts begin anew after 2**32."""
        return (self._counts[rank * (LINE_BYTES // 4)] - self._turn) & 0xFFFFFFFF < 2**31

    def _await(self, other: int) -> None:
        for _ in range(self._spins):
            if self._is_here(other):
                return
        began = time.monotonic()
        while True:
            seen = self._counts[other * (LINE_BYTES // 4)]
            if self._is_here(other):
                return
            if self._futex(other, _WAIT, seen) == errno.ETIMEDOUT:
                self._look_for_the_others(time.monotonic() - began)

    def _futex(self, rank: int, operation: int, value: int) -> int:
        """Wait until a rank's count is no longer `value`, or wake who waits for this one; returns the error number."""
        word = ctypes.c_void_p(self._address + rank * LINE_BYTES)
        pause = ctypes.byref(self._pause) if operation == _WAIT else None
        result = self._syscall(self._number, word, operation, ctypes.c_uint32(value), pause, None, 0)
        return ctypes.get_errno() if result < 0 else 0

    def _look_for_the_others(self, waited: float) -> None:
        late = [other for other in self._others if not self._is_here(other)]
        lost = [other for other in late if not self._processes[other].lives]
        if lost and [other for other in lost if not self._is_here(other)]:
            raise LostRankError(f"{self._named(lost)} ended while rank {self._rank} waited for it.")
        if waited > self.seconds:
            raise LostRankError(f"{self._named(late)} did not come within {self.seconds:.0f} s (the group's timeout).")

    def _named(self, ranks: Sequence[int]) -> str:
        return ", ".join(f"rank {rank} (process {self._processes[rank].pid})" for rank in ranks)
