"""A directory of checkpoints, each of which is complete: step-00000010, step-00000020, …

A checkpoint is written into step-N.partial and renamed when it is complete and on the disk. A crash in a save leaves
the older ones as they are. One process writes. It locks the directory, so that two jobs cannot write into it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import socket
import stat
import sys
import time
from pathlib import Path

PARTIAL = ".partial"
LOCK = ".lock"
_LOCK_SECONDS = 15.0  # a killed process that still ends holds the lock for a moment
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class CheckpointError(Exception):
    """A checkpoint cannot be written, read or used. The message names the file and a fix. Nothing was overwritten."""


class SavedSteps:
    """The checkpoints in a directory, which `lock` makes. It keeps the `keep` newest, 1 or more."""

    def __init__(self, path: str | os.PathLike[str], keep: int = 2) -> None:
        if keep < 1:
            raise ValueError(
                f"keep={keep}: the number of checkpoints to keep. Allowed: 1 or more. Fix: pass one of these"
            )
        self.path = Path(path)
        self.keep = keep
        self._lock: int | None = None

    def lock(self) -> None:
        """Makes the directory, and locks it until this process ends. Raises CheckpointError if it cannot."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = open_regular(self.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
            _hide_from_readers(self._lock)
        except OSError as error:
            raise CheckpointError(
                f"{error.filename}: checkpoints cannot be written here: {error.strerror}. "
                "Fix: choose a directory that this user can write, and in which this is a file or missing"
            ) from error
        # A POSIX lock: unlike flock's, it ends with this process even if a forked worker lives on.
        ends = time.monotonic() + _LOCK_SECONDS
        while not self._try_lock():
            if time.monotonic() > ends:
                holder = os.pread(self._lock, 200, 0).decode(errors="replace").strip() or "unknown"
                raise CheckpointError(
                    f"{self.path}: another job writes its checkpoints here ({holder}). "
                    "Fix: end that job, or choose another directory"
                )
            time.sleep(0.05)

    def _try_lock(self) -> bool:
        assert self._lock is not None
        try:
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                return False
            print(
                f"shoal: {self.path} has no locks: a second job that writes there is not noticed",
                file=sys.stderr,
            )
            return True
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"host {socket.gethostname()}, process {os.getpid()}\n".encode(), 0)
        return True

    def steps(self) -> list[int]:
        """Returns the steps of the complete checkpoints, in ascending order."""
        if not self.path.is_dir():
            return []
        found = (re.fullmatch("step-([0-9]{8,18})", entry.name) for entry in self.path.iterdir())
        return sorted(step for step in {int(each[1]) for each in found if each} if self.path_of(step).exists())

    def path_of(self, step: int) -> Path:
        return self.path / f"step-{step:08}"

    def begin(self, step: int) -> Path:
        """Removes the remains of interrupted saves, and returns the path at which to write the checkpoint of a step."""
        for entry in [*self.path.iterdir()]:
            if entry.name.endswith(PARTIAL) and entry.name.startswith("step-"):
                _remove(entry)
        return self.path / f"step-{step:08}{PARTIAL}"

    def publish(self, step: int) -> None:
        """Makes a complete checkpoint visible, and removes old ones. Raises CheckpointError if the step has one."""
        partial = self.path / f"step-{step:08}{PARTIAL}"
        _sync(partial)
        try:
            partial.rename(self.path_of(step))
        except OSError as error:
            raise CheckpointError(
                f"{self.path_of(step)}: there already is a checkpoint of step {step}, which is left as it is. "
                "Fix: choose another directory, or remove this one"
            ) from error
        _sync(self.path)
        for old in self.steps()[: -self.keep]:
            # Renamed first: a crash while it is removed leaves nothing that looks complete.
            removed = self.path / f"step-{old:08}{PARTIAL}"
            self.path_of(old).rename(removed)
            _remove(removed)

    def write_error(self, step: int, error: Exception) -> CheckpointError:
        return CheckpointError(
            f"{self.path_of(step)} cannot be written: {error}. Older checkpoints are intact. "
            "Fix: free space, or choose another directory"
        )

    def advice(self, step: int) -> str:
        older = [each for each in self.steps() if each < step]
        aside = f"move {self.path_of(step)} away"
        if older:
            return f"Fix: {aside}, and the job goes on from {self.path_of(older[-1]).name}"
        return f"Fix: {aside}, and the job starts at step 0"


def open_regular(path: Path, flags: int = os.O_RDONLY) -> int:
    """Opens a file that others may have put there. Raises OSError for a pipe, without waiting, or another thing."""
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o660)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "not a file", os.fspath(path))


def _hide_from_readers(lock: int) -> None:
    """Keeps who cannot write to a lock file from reading it too: a reader can lock it, and stop the job's saves."""
    mode = stat.S_IMODE(os.fstat(lock).st_mode)
    with contextlib.suppress(OSError):  # of another user
        os.fchmod(lock, mode & ~((~mode & 0o222) << 1))


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _sync(path: Path) -> None:
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
