"""Marks a job's directory while a command runs the job, and remembers the directories of all jobs of this user.

The mark is a locked file, so it ends with the command, also if that is killed. The directories are remembered as links
in $XDG_STATE_HOME/shoal/jobs, by default ~/.local/state/shoal/jobs, one directory for each machine.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from shoal.clean_text import print_error
from shoal.errors import UsageError

MARK = ".running"
_PATIENCE = 2.0
"""Seconds in which other commands that look at the mark give it free again."""


@contextlib.contextmanager
def mark_running(directory: Path) -> Iterator[None]:
    """Mark a job's directory as one that this process runs, and remember it. The mark is removed at the end.

    The caller has locked the job's checkpoints. Raises `UsageError` if another command runs the job with others.
    """
    mark = directory / MARK
    with mark.open("a") as file:
        until = time.monotonic() + _PATIENCE
        while not _try_lock(file.fileno(), fcntl.LOCK_EX):
            if time.monotonic() > until:
                raise UsageError(
                    f"{directory.name}: another command runs this job. Fix: shoal stop {directory}, or wait for its end"
                )
            time.sleep(0.01)
        try:
            _remember(directory)
            yield
        finally:
            mark.unlink(missing_ok=True)


def is_running(directory: Path) -> bool:
    """Return whether a command runs the job with this directory."""
    try:
        with (directory / MARK).open() as file:
            return not _try_lock(file.fileno(), fcntl.LOCK_SH)
    except OSError:
        return False


def wait_for_end(directory: Path) -> None:
    """Wait until no command runs the job with this directory."""
    with contextlib.suppress(FileNotFoundError), (directory / MARK).open() as file:
        fcntl.flock(file, fcntl.LOCK_SH)


def _try_lock(descriptor: int, kind: int) -> bool:
    """Lock a file, and return whether that was possible at once."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _state_directory() -> Path:
    """Return the directory of links, which may be missing. Machines may share a home directory."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base, "shoal", "jobs", socket.gethostname())


def _remember(directory: Path) -> None:
    """Make a link to a job's directory. If that fails, print a warning: other commands need the directory's path."""
    links = _state_directory()
    link = links / hashlib.sha256(os.fsencode(directory)).hexdigest()[:16]
    try:
        links.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            link.symlink_to(directory)
    except OSError as error:
        print_error(f"warning: {link} cannot be written ({error.strerror}), so `shoal ps` does not list this job")


def list_directories() -> list[Path]:
    """Return the directories of this user's jobs on this machine. Links to those that were removed are removed too."""
    found = []
    with contextlib.suppress(FileNotFoundError):
        for link in list(_state_directory().iterdir()):
            if link.is_dir():
                found.append(link.readlink())
            else:
                link.unlink(missing_ok=True)
    return found
