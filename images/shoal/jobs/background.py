"""Moves a command to the background: a child process in a session of its own, which outlives the terminal.

The child runs the same code as a command in the foreground. Until the job has started, errors go to the terminal.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path


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
