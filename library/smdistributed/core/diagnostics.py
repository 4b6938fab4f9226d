"""Messages about a collective that cannot end: which ranks, their collectives, and where their scripts are.

Also has the errors of collectives, finds stalls, and reads numbers of seconds from the environment.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Hashable

_STACK_CALLS = 8


class CollectiveError(RuntimeError):
    """A collective that cannot end; the message names the ranks and the reason. The group is unusable afterwards."""


class UnexplainedError(CollectiveError):
    """A collective error that this rank alone cannot explain; a `GroupMonitor` asks the other ranks."""


class StallDetector:
    """Decides which waits are stalls: those above SMDDP_STALL_SECONDS. Raises CollectiveError if that is invalid."""

    def __init__(self) -> None:
        self.seconds = read_seconds("SMDDP_STALL_SECONDS", 60)
        self._reported: set[Hashable] = set()

    def is_new_stall(self, wait: Hashable, seconds: float) -> bool:
        """Returns True once for each wait, identified by `wait`: when it has lasted too long."""
        if seconds <= self.seconds or wait in self._reported:
            return False
        self._reported.add(wait)
        return True

    def reset(self) -> None:
        """Forgets the reported waits, so that their identifiers can be used again."""
        self._reported.clear()


def read_seconds(name: str, default: float) -> float:
    """Reads an environment variable; empty counts as unset. Raises CollectiveError if it is not a number above 0."""
    text = os.environ.get(name) or str(default)
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise CollectiveError(
            f"{name}={text!r} is invalid. Allowed: a number of seconds above 0. Fix: set one, or unset it."
        )
    return seconds


def main_thread_stack() -> str:
    """Returns the last 8 calls of the main thread with their source lines, innermost last; a note if it has ended."""
    ident = threading.main_thread().ident
    frame = sys._current_frames().get(ident if ident is not None else 0)
    if frame is None:
        return "  (it has ended)"
    return "".join(traceback.format_stack(frame)[-_STACK_CALLS:]).rstrip()


def describe_collective(number: int, name: str, dtype: str, op: str, root: int, size: int) -> str:
    """Names a collective for people. `number` 0: it has called none. `root` -1: none. `size` is in bytes."""
    if not number:
        return "no collective yet"
    reduction = f" of {dtype} with {op}" if "reduce" in name else ""
    rooted = name in ("reduce", "broadcast", "scatter", "gather") and root >= 0
    with_root = f" with root {root}" if rooted else ""
    bytes_ = "" if name == "barrier" else f", {size:,} bytes"
    return f"{name}{reduction}{with_root}{bytes_} (collective {number} of the group)"


def describe_laggard(rank: int, last: str, stack: str | None) -> str:
    """Describes a late rank: its last collective and its main thread's stack; None: it does not answer."""
    position = "It does not answer: it may be stopped." if stack is None else f"Its main thread is at:\n{stack}"
    return f"\nRank {rank} last called {last}. {position}"


def collective_mismatch(rank: int, mine: str, other: int, theirs: str) -> str:
    """Describes two ranks that call different collectives now, or called different ones earlier."""
    if mine == theirs:
        return (
            f"Ranks called different collectives before this one: rank {rank} and rank {other} both call {mine}, but "
            "an earlier one differed. Fix: call the same collectives on all ranks, in the same order, with the same "
            "root."
        )
    return f"Ranks called different collectives: rank {rank} calls {mine}, rank {other} calls {theirs}."


def peer_aborted(rank: int, collective: str, report: str) -> str:
    return f"Another rank aborted while rank {rank} was in {collective}. It reports: {report}"
