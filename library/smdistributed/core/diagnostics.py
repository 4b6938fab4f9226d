"""What is said of a collective that cannot end: which ranks, what each has called, and where its script is."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from typing import Protocol

_STACK_CALLS = 8


class CollectiveError(RuntimeError):
    """A collective that cannot end; the message names the ranks and says why. The group is of no use any more."""


class UnexplainedError(CollectiveError):
    """One of which a `Watch` can tell more: the message says what this rank alone has seen."""


class Store(Protocol):
    """Where ranks leave words for each other; `get` waits for the word."""

    def set(self, key: str, value: str, /) -> object: ...
    def get(self, key: str, /) -> bytes: ...


def stall_seconds() -> float:
    """After how many seconds a rank that waits says so: SMDDP_STALL_SECONDS, else 60. Raises as `seconds_of` does."""
    return seconds_of("SMDDP_STALL_SECONDS", 60)


def seconds_of(name: str, default: float) -> float:
    """What that variable of the environment says. Raises CollectiveError when it is no number above 0."""
    text = os.environ.get(name) or str(default)
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise CollectiveError(f"{name}={text!r} is not a number of seconds above 0.")
    return seconds


def main_thread_stack() -> str:
    """Where the main thread is, innermost last: the last calls, with their lines."""
    ident = threading.main_thread().ident
    frame = sys._current_frames().get(ident if ident is not None else 0)
    if frame is None:
        return "  (it has ended)"
    return "".join(traceback.format_stack(frame)[-_STACK_CALLS:]).rstrip()


def described(number: int, name: str, dtype: str, op: str, root: int, size: int) -> str:
    """A collective as a person names it; `size` in bytes, number 0: there was none."""
    if not number:
        return "no collective yet"
    reduction = f" of {dtype} with {op}" if "reduce" in name else ""
    rooted = name in ("reduce", "broadcast", "scatter", "gather") and root >= 0
    where = f" with root {root}" if rooted else ""
    bytes_ = "" if name == "barrier" else f", {size:,} bytes"
    return f"{name}{reduction}{where}{bytes_} (collective {number} of the group)"


def describe_laggard(rank: int, last: str, stack: str | None) -> str:
    """What a rank that is late has called last, and where it is now; None: it does not say."""
    where = "It does not answer: it may be stopped." if stack is None else f"Its main thread is at:\n{stack}"
    return f"\nRank {rank} has last called {last}. {where}"


def collective_mismatch(rank: int, mine: str, other: int, theirs: str) -> str:
    """Say that two ranks call different collectives, or have done so before."""
    if mine == theirs:
        return (
            f"The ranks have come apart before this collective: rank {rank} and rank {other} both call "
            f"{mine}, and have called different ones earlier. Let all ranks call the same, with the same root."
        )
    return f"The ranks have come apart: rank {rank} calls {mine}, rank {other} calls {theirs}."


def peer_aborted(rank: int, here: str, says: str) -> str:
    """Say that another rank has ended the group, and why."""
    return f"Another rank has given up while rank {rank} was in {here}. It says, {says}"
