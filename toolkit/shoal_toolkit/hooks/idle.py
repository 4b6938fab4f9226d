"""Waits until the other threads of this process have nothing to do."""

from __future__ import annotations

import os
import threading
import time

_INTERVAL_S = 0.001
_FIELDS = ("State:", "voluntary_ctxt_switches:", "nonvoluntary_ctxt_switches:")  # of proc_pid_status(5)


def wait_for_idle_threads(limit_s: float = 1.0) -> None:
    """Waits until all other threads sleep, and none has run between two looks at them.

    Python's lock is free between the looks: a thread that waits for it gets it, and counts as one that has run.

    Args:
        limit_s: Seconds after which it returns anyway. A thread of the script may compute until Python ends.
    """
    limit = time.monotonic() + limit_s
    before: list[str] = []
    while time.monotonic() < limit:
        threads = _look()
        if threads == before and not any("State:\tR" in thread for thread in threads):
            return
        before = threads
        time.sleep(_INTERVAL_S)


def _look() -> list[str]:
    """Returns the state of each other thread, and how often it has run; nothing on a system without /proc."""
    threads = []
    for number in sorted(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else ():
        if int(number) != threading.get_native_id():
            try:
                with open(f"/proc/self/task/{number}/status", encoding="ascii", errors="replace") as file:
                    threads.append("".join(line for line in file if line.startswith(_FIELDS)))
            except OSError:  # it has ended
                threads.append("")
    return threads
