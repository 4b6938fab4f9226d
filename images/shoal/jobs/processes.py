"""Finds processes of this user's jobs, signals them, and moves the command of a job to the background.

The command of a job is named by its number, and by its start and the boot of the machine: a number is used again. The
processes of a host without Docker are found by their environment, among all of this machine.

A command in the background is a child process in a session of its own, which outlives the terminal. It runs the same
code as in the foreground. Until the job has started, errors go to the terminal.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from shoal import trust

BASE = "SAGEMAKER_BASE_DIR"
"""The variable with the tree of a host. All of its processes inherit it."""
STOP_SECONDS = 30
"""How long the script may take to end after an interrupt."""
_START = 19
"""The place of a process's start in /proc/PID/stat after its name: field 22 of proc(5)."""
_MARGIN = 5
_PAUSE = 0.2


def read_environment(pid: int) -> dict[str, str]:
    """Returns the environment that a process was started with; empty if it has ended or is another user's."""
    with contextlib.suppress(OSError):
        pairs = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        return dict(os.fsdecode(pair).split("=", 1) for pair in pairs if b"=" in pair)
    return {}


def list_processes(tree: Path) -> list[int]:
    """Returns the processes of the host with a tree; first those that none of them has started, such as `train`.

    Processes of other users and of containers are left out: they can have any environment.
    """
    numbers = sorted(int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal())
    found = [pid for pid in numbers if read_environment(pid).get(BASE) == str(tree) and _is_own(pid)]
    return sorted(found, key=lambda pid: _read_parent(pid) in found)


def list_descendants(tree: Path, ancestor: int) -> list[int]:
    """Returns the processes of the host with a tree that a process has started, in the same order.

    A program with the setuid bit, which another user can start with any environment, is not among them.
    """
    return [pid for pid in list_processes(tree) if ancestor in _list_ancestors(pid)]


def _list_ancestors(pid: int) -> list[int]:
    found = []
    while (pid := _read_parent(pid)) and pid not in found:
        found.append(pid)
    return found


def _is_own(pid: int) -> bool:
    with contextlib.suppress(OSError, KeyError):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        found = {name: values.split() for name, _, values in (line.partition(":") for line in lines)}
        # A process of a container has further numbers: root in it has the number of this machine's root.
        return {*map(int, found["Uid"])} <= trust.own_ids() and len(found.get("NSpid", ())) <= 1
    return False


def _read_parent(pid: int) -> int:
    """Returns the parent of a process; 0 if it has ended."""
    return int((_read_status(pid) or ["", "0"])[1])


def _read_status(pid: int) -> list[str]:
    """Returns the fields of /proc/PID/stat after the name; none if the process has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return []


def describe_start(pid: int) -> str:
    """Returns the boot of the machine and the start of a process, in ticks after it; empty if it has ended."""
    with contextlib.suppress(OSError, IndexError):
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {_read_status(pid)[_START]}"
    return ""


def is_alive(pid: int, start: str) -> bool:
    """Returns whether a process is this user's and the one with a start, and not another with its number."""
    return bool(start) and describe_start(pid) == start and _is_own(pid)


def send_signal(pid: int, start: str, number: signal.Signals) -> bool:
    """Sends a signal to a process of this user, and returns whether it is the one with a start. Others get none."""
    if not is_alive(pid, start):
        return False
    _kill(pid, number)
    return True


def stop_processes(trees: Iterable[Path]) -> None:
    """Stops the hosts with these trees: SIGTERM to `train`, which ends the script, and SIGKILL to all 35 s later."""
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


@dataclass
class Background:
    """The child's side: its standard streams, and the pipe on which its parent waits."""

    pipe: int
    """A file descriptor."""
    log: int = -1
    """The descriptor of the log file; -1 before it is opened."""

    def open_log(self, path: Path) -> None:
        """Sends standard output to a file from now on. Only its owner can read it."""
        self.log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
        sys.stdout.flush()
        os.dup2(self.log, 1)

    def release_parent(self, directory: Path) -> None:
        """Sends standard error to the log file too, and lets the parent end: the job in a directory has started."""
        sys.stderr.flush()
        os.dup2(self.log, 2)
        with contextlib.suppress(BrokenPipeError):  # the parent was killed
            os.write(self.pipe, os.fsencode(directory))
        os.close(self.pipe)


def fork_to_background() -> Background | Path:
    """Forks. Returns the child's side in the child, and in the parent, the directory of the job that has started.

    The child's standard input is empty. If it ends before its job starts, the parent exits with its exit code. An
    interrupt of the parent stops the child too.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        os.setsid()
        with Path(os.devnull).open() as empty:
            os.dup2(empty.fileno(), 0)
        return Background(writer)
    os.close(writer)
    try:
        with os.fdopen(reader, "rb") as pipe:
            if directory := pipe.read():
                return Path(os.fsdecode(directory))
    except BaseException:
        os.kill(child, signal.SIGTERM)
        os.waitpid(child, 0)
        raise
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    sys.exit(128 - code if code < 0 else code)
