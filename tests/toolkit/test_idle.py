"""Waiting until the other threads of a process are idle."""

from __future__ import annotations

import hashlib
import threading
import time

from shoal_toolkit.hooks.idle import wait_for_idle_threads


def test_a_thread_that_computes_is_waited_for() -> None:
    """It computes without Python's lock, as a thread of C++."""
    digest = hashlib.sha256()
    thread = threading.Thread(target=digest.update, args=[bytes(50_000_000)])
    thread.start()
    wait_for_idle_threads(60)
    assert not thread.is_alive()


def test_sleeping_threads_are_not_waited_for_and_busy_ones_not_for_ever() -> None:
    end = threading.Event()
    sleeping = threading.Thread(target=end.wait)
    busy = threading.Thread(target=lambda: [None for _ in iter(end.is_set, True)])
    sleeping.start()
    began = time.monotonic()
    wait_for_idle_threads(60)
    assert time.monotonic() - began < 30
    busy.start()
    wait_for_idle_threads(0.1)
    assert busy.is_alive()
    end.set()
    for thread in (sleeping, busy):
        thread.join()
