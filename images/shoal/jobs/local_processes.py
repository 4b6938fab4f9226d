"""Finds the processes of a job's host without Docker, in all processes of this machine, by their environment."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

from shoal.jobs.watch import STOP_SECONDS

BASE = "SAGEMAKER_BASE_DIR"
"""The variable with the tree of a host. All of its processes inherit it."""
_MARGIN = 5
_PAUSE = 0.2


def read_environment(pid: int) -> dict[str, str]:
    """Return the environment that a process was started with; empty if it has ended or is another user's."""
    with contextlib.suppress(OSError):
        pairs = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        return dict(os.fsdecode(pair).split("=", 1) for pair in pairs if b"=" in pair)
    return {}


def list_processes(tree: Path) -> list[int]:
    """Return the processes of the host with a tree; first those that none of them has started, such as `train`."""
    numbers = sorted(int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal())
    found = [pid for pid in numbers if read_environment(pid).get(BASE) == str(tree)]
    return sorted(found, key=lambda pid: _read_parent(pid) in found)


def _read_parent(pid: int) -> int:
    """Return the parent of a process; 0 if it has ended."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def stop_processes(trees: Iterable[Path]) -> None:
    """Stop the hosts with these trees: SIGTERM to `train`, which ends the script, and SIGKILL to all 35 s later."""
    trees = list(trees)
    for tree in trees:
        for pid in list_processes(tree)[:1]:  # `train` has started the others
            _kill(pid, signal.SIGTERM)
    until = time.monotonic() + STOP_SECONDS + _MARGIN
    while any(list_processes(tree) for tree in trees):
        if time.monotonic() > until:
            for pid in (pid for tree in trees for pid in list_processes(tree)):
                _kill(pid, signal.SIGKILL)
        time.sleep(_PAUSE)


def _kill(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
