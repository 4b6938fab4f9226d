"""Answers a script's questions about restarts and stops: its checkpoints, the reason of a restart, the time left.

It saves nothing itself, and needs no framework. The modules `torch` and `tensorflow` save and load the state of a
training. Importing does nothing; `seconds_left` installs a handler for SIGTERM.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["STOPPED", "Restart", "directory", "restart", "seconds_left"]

_DEFAULT_STOP_GRACE = 110  # seconds, as `train` has it if it started this process
STOPPED = 128 + signal.SIGTERM
"""The exit code of a script that has saved its state after SIGTERM: 143, as `train` ends with it."""


class Restart(NamedTuple):
    """How often the ranks of this job have started again, for any reason: 0 at the first start, which has no reason.

    A restart because a host came back counts here, although it does not count against `SHOAL_MAX_RESTARTS`.
    """

    number: int
    reason: str


def restart() -> Restart:
    """Returns how often the job has been restarted, and why the last time (`SHOAL_RESTART`, `SHOAL_RESTART_REASON`)."""
    return Restart(int(os.environ.get("SHOAL_RESTART", "0")), os.environ.get("SHOAL_RESTART_REASON", ""))


def directory() -> str | None:
    """Returns the directory for checkpoints, which the platform provides: /opt/ml/checkpoints in SageMaker's contract.

    Returns:
        Its path. None if it is not there, or if `train` has not started this script. On a machine of yours, a directory
        of this name can be from any earlier job.
    """
    if "SM_CURRENT_HOST" not in os.environ:
        return None
    path = Path(os.environ.get("SAGEMAKER_BASE_DIR", "/opt/ml"), "checkpoints")
    return str(path) if path.is_dir() else None


class _Stop:
    installed = False
    received: float | None = None
    before: Callable[[int, Any], Any] | int | None = None


def seconds_left() -> float | None:
    """Returns how many seconds a stopped job has until SIGKILL.

    The first call installs a handler, so that SIGTERM no longer ends the process. Call it once before the training, and
    after each step. End the process when you have saved: `sys.exit(STOPPED)`.

    Returns:
        None if SIGTERM has not come. Otherwise the rest of `SHOAL_STOP_GRACE`, never below 0.

    Raises:
        ValueError: If the first call is not in the main thread. Python handles signals only there.
    """
    if not _Stop.installed:
        _Stop.before = signal.signal(signal.SIGTERM, _note_stop)
        _Stop.installed = True
    if _Stop.received is None:
        return None
    grace = float(os.environ.get("SHOAL_STOP_GRACE", _DEFAULT_STOP_GRACE))
    return max(_Stop.received + grace - time.monotonic(), 0.0)


def _note_stop(number: int, frame: Any) -> None:
    """Handles SIGTERM: notes the time of the first, and calls the handler that was there before."""
    if _Stop.received is None:
        _Stop.received = time.monotonic()
    if callable(_Stop.before):
        _Stop.before(number, frame)
