"""Runs pieces of work of which some stand on others: several at once, what they stand on first."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from queue import SimpleQueue
from typing import TypeVar

T = TypeVar("T")

_PATIENCE = 10.0
"""Seconds that work which was told to stop has to end."""


class NotTriedError(Exception):
    """The work was not tried, because what it stands on failed or was not tried."""


def run(
    below: Mapping[str, str | None], work: Callable[[str], T], stop: Callable[[], None], jobs: int
) -> dict[str, T | Exception]:
    """Do `work` for every name in `below` in that order, up to `jobs` at once; return its results and errors by name.

    `below` says for each name which other it stands on; one that is not among the names is there already. A failure
    stops only what stands on it. An interrupt calls `stop`, which makes the work under way end, and goes on upwards.
    """
    ended: SimpleQueue[tuple[str, T | Exception]] = SimpleQueue()
    results: dict[str, T | Exception] = {}
    running: dict[str, threading.Thread] = {}

    def one(name: str) -> None:
        try:
            ended.put((name, work(name)))
        except Exception as error:
            ended.put((name, error))

    try:
        while len(results) < len(below):
            results |= _not_to_try(below, results)
            ready = [name for name in _ready(below, results) if name not in running]
            for name in ready[: jobs - len(running)]:
                running[name] = threading.Thread(target=one, args=(name,), daemon=True)
                running[name].start()
            if running:
                name, result = ended.get()
                running.pop(name).join()
                results[name] = result
    except BaseException:
        stop()
        for thread in running.values():
            thread.join(_PATIENCE)
        raise
    return {name: results[name] for name in below}


def _not_to_try(below: Mapping[str, str | None], results: Mapping[str, object]) -> dict[str, NotTriedError]:
    return {
        name: NotTriedError(f"it stands on {beneath}")
        for name, beneath in below.items()
        if name not in results and beneath and isinstance(results.get(beneath), Exception)
    }


def _ready(below: Mapping[str, str | None], results: Mapping[str, object]) -> list[str]:
    done = {name for name, result in results.items() if not isinstance(result, Exception)}
    there = done | (set(below.values()) - set(below))  # of those that are not among the names, one is None
    return [name for name, beneath in below.items() if name not in results and beneath in there]
