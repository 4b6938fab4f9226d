"""Runs tasks that depend on each other: several at once, each after the one that it depends on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from queue import SimpleQueue
from typing import TypeVar

T = TypeVar("T")

_PATIENCE = 10.0
"""Seconds that stopped tasks have to end."""


class NotTriedError(Exception):
    """The task was not tried, because the one that it depends on failed or was not tried."""


def run_tasks(
    parents: Mapping[str, str | None], work: Callable[[str], T], stop: Callable[[], None], jobs: int
) -> dict[str, T | Exception]:
    """Runs `work` for every name in `parents`, up to `jobs` at once; returns its results and errors by name.

    Each call has a thread of its own. A failure stops only the tasks that depend on it: their error is `NotTriedError`.
    An interrupt calls `stop`, waits up to 10 s for each running task, and is raised.

    Args:
        parents: For each name, in the order to begin with, the name that it depends on. A parent that is not itself
            a name is done already.
        stop: Makes the running tasks end.
    """
    ended: SimpleQueue[tuple[str, T | Exception]] = SimpleQueue()
    results: dict[str, T | Exception] = {}
    running: dict[str, threading.Thread] = {}

    def one(name: str) -> None:
        """Body of a thread: puts the result of a task, or its error, into the queue."""
        try:
            ended.put((name, work(name)))
        except Exception as error:
            ended.put((name, error))

    try:
        while len(results) < len(parents):
            results |= _skipped(parents, results)
            ready = [name for name in _ready(parents, results) if name not in running]
            for name in ready[: jobs - len(running)]:
                running[name] = threading.Thread(target=one, args=(name,), daemon=True)
                running[name].start()
            if running:
                name, result = ended.get()
                running.pop(name).join()
                results[name] = result
    except BaseException:
        stop()
        # An interrupt inside start() leaves a thread that cannot be joined.
        for thread in filter(threading.Thread.is_alive, running.values()):
            thread.join(_PATIENCE)
        raise
    return {name: results[name] for name in parents}


def _skipped(parents: Mapping[str, str | None], results: Mapping[str, object]) -> dict[str, NotTriedError]:
    """Returns an error for each task without a result that depends directly on a failed one."""
    return {
        name: NotTriedError(f"it extends {parent}, which was not built")
        for name, parent in parents.items()
        if name not in results and parent and isinstance(results.get(parent), Exception)
    }


def _ready(parents: Mapping[str, str | None], results: Mapping[str, object]) -> list[str]:
    done: set[str | None] = {name for name, result in results.items() if not isinstance(result, Exception)}
    done |= set(parents.values()) - set(parents)  # None among them
    return [name for name, parent in parents.items() if name not in results and parent in done]
