"""Waits for calls that an attack may keep forever."""

from __future__ import annotations

import threading
from collections.abc import Callable

SECONDS = 20


def error_in_time(call: Callable[[], object]) -> Exception | None:
    """Return the exception that a call raises, or None; fail if it does not end."""
    raised: list[Exception] = []

    def run() -> None:
        try:
            call()
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(SECONDS)
    assert not thread.is_alive(), f"it still waits after {SECONDS} s"
    return raised[0] if raised else None
