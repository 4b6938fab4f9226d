"""The directory with a job's checkpoints: locked for one command, marked with its job, and replaced as a whole.

Why it is marked, and why a new job does not continue from it: docs/decisions/checkpoints-belong-to-a-job.md.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import shutil
import socket
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from shoal.docker_client import archive
from shoal.errors import UsageError

MARK = ".shoal-job.json"
"""The file in the directory that names its job. The job itself does not see it."""
CONTENT = "checkpoints"
"""The name of the directory in /opt/ml, and in the scratch directory of `replace`."""
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of Linux


@dataclass(frozen=True)
class CheckpointDirectory:
    """A directory that this command has locked and marked with its job."""

    path: Path
    job: str
    lock: int
    """A file descriptor. A process that inherits it keeps the lock."""

    def has_files(self) -> bool:
        """Return whether it has a checkpoint, or any other file."""
        return any(path.name != MARK for path in self.path.iterdir())

    def pack(self, arcname: str, out: IO[bytes]) -> None:
        """Write its content as `arcname`, owned by root, and rewind `out`."""
        archive.pack_tree(self.path, arcname, out, left_out=MARK)

    def copy_to(self, target: Path) -> None:
        """Copy its content to an existing directory."""
        copy_tree(self.path, target)
        (target / MARK).unlink()

    @contextlib.contextmanager
    def replace(self) -> Iterator[Path]:
        """Replace the content in one step when the body has ended. An exception leaves the content unchanged.

        Yields a new scratch directory on the same disk. The body makes the new content there, as `CONTENT`. The
        scratch directory is removed. A crash at any moment leaves the old content or the new one.
        """
        scratch = _sibling(self.path, "new")
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        try:
            yield scratch
            content = scratch / CONTENT
            _write_mark(content, self.job)
            _flush(content)
            _exchange(content, self.path)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


@contextlib.contextmanager
def open_directory(path: Path, job: str, option: str) -> Iterator[CheckpointDirectory]:
    """Lock a directory for this command and mark it with a job. It is created if it is missing.

    The lock ends with the process, also if it is killed. The rest of an earlier command that was killed is removed.

    Args:
        path: The directory.
        job: The name of the job.
        option: The option and its value, for messages.

    Raises:
        UsageError: If another command uses it, it belongs to another job, or it cannot be replaced as a whole.
    """
    path = path.resolve()
    _check_place(path, option)
    path.parent.mkdir(parents=True, exist_ok=True)
    with _lock(path, job, option) as lock:
        shutil.rmtree(_sibling(path, "new"), ignore_errors=True)
        old = _sibling(path, "old")
        if old.exists() and not path.exists():  # killed between the two steps of `_exchange`
            old.rename(path)
        shutil.rmtree(old, ignore_errors=True)
        path.mkdir(exist_ok=True)
        _check_owner(path, job, option)
        _write_mark(path, job)
        yield CheckpointDirectory(path, job, lock)


def _sibling(path: Path, suffix: str) -> Path:
    """Return a path next to a directory, on the same disk."""
    return path.with_name(f".{path.name}.shoal-{suffix}")


def _check_place(path: Path, option: str) -> None:
    """Raise `UsageError` if a path is not a directory, or one that must not be replaced by another."""
    if path.exists() and not path.is_dir():
        raise UsageError(f"{option}: not a directory")
    if Path.cwd().is_relative_to(path) or Path.home().is_relative_to(path):
        raise UsageError(
            f"{option}: {path} contains this directory or your home, and the job replaces it as a whole. Fix: name a"
            " directory only for checkpoints"
        )
    if os.path.ismount(path):
        raise UsageError(
            f"{option}: {path} is a mount point, which cannot be replaced as a whole. Fix: name a directory in it, such"
            f" as {path / 'checkpoints'}"
        )


@contextlib.contextmanager
def _lock(path: Path, job: str, option: str) -> Iterator[int]:
    """Lock the file next to a directory, and yield its descriptor. Raise `UsageError` if another command has locked it.

    The file is removed at the end. One that a killed command has left is not locked.
    """
    place = _sibling(path, "lock")
    with contextlib.ExitStack() as stack:
        while True:
            file = stack.enter_context(place.open("a+"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                raise UsageError(_describe_use(path, file.read(), job, option)) from None
            except OSError as error:
                raise UsageError(
                    f"{option}: {place} cannot be locked: {error.strerror}. Fix: choose a path on another file system"
                ) from error
            if _is_same_file(place, file):  # otherwise another command has removed it since it was opened
                break
        file.truncate(0)
        file.write(json.dumps({"job": job, "process": os.getpid(), "machine": socket.gethostname()}))
        file.flush()
        try:
            yield file.fileno()
        finally:
            place.unlink(missing_ok=True)


def _is_same_file(path: Path, file: IO[str]) -> bool:
    """Return whether a path still leads to an open file."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _describe_use(path: Path, holder: str, job: str, option: str) -> str:
    """Return the error for a directory that a command with the lock file's text `holder` uses."""
    try:
        found = json.loads(holder)
        who, where = str(found["job"]), f"process {found['process']} on {found['machine']}"
    except (ValueError, TypeError, KeyError):  # it has just been locked
        who, where = "", "unknown process"
    if who == job:
        return f"{option}: the job still runs ({where}). Fix: wait for its end, or `shoal stop`"
    user = who or "another job"
    return f"{option}: {path} is used by {user} ({where}). Fix: wait for its end, or name another directory"


def _check_owner(path: Path, job: str, option: str) -> None:
    """Raise `UsageError` if a directory, one above it or one in it has the checkpoints of another job."""
    marks = [parent / MARK for parent in path.parents if (parent / MARK).exists()]
    marks += [mark for mark in path.rglob(MARK) if mark.parent != path]
    for mark in marks:
        raise UsageError(
            f"{option}: {mark.parent} has the checkpoints of a job ({MARK}), and a job replaces its directory as a"
            " whole. Fix: name a directory that is not above or below it"
        )
    mark = path / MARK
    if not mark.exists():
        return
    owner = _read_mark(mark, option)
    if owner != job and any(path.name != MARK for path in path.iterdir()):
        raise UsageError(
            f"{option}: {path} has the checkpoints of the job {owner}, and nothing was changed. Fix: to continue that"
            f" job, use --resume {owner}, or --resume with its --name; for a new job, name another directory. To start"
            f" a new job from these checkpoints, copy the directory, and remove {MARK} from the copy"
        )


def _read_mark(mark: Path, option: str) -> str:
    """Return the name of the job in a mark. Raises `UsageError` if it has none."""
    try:
        return str(json.loads(mark.read_text())["job"])
    except (ValueError, TypeError, KeyError) as error:
        raise UsageError(
            f"{option}: {mark} does not name a job, so its owner is unknown, and nothing was changed. Fix: remove that"
            " file if the checkpoints are yours"
        ) from error


def _write_mark(directory: Path, job: str) -> None:
    """Write the mark, unless it is right already."""
    text = json.dumps({"job": job}) + "\n"
    mark = directory / MARK
    if not mark.is_file() or mark.read_text(errors="replace") != text:
        partial = directory / f"{MARK}.new"
        partial.write_text(text)
        partial.replace(mark)


def copy_tree(source: Path, target: Path, link: bool = False) -> None:
    """Copy files, directories and symbolic links to an existing directory; others, such as sockets, are left out.

    With `link`, files become hard links if both are on one file system, so that no bytes are copied.
    """

    def ignore(directory: str, names: list[str]) -> set[str]:
        """Return the entries that are not copied."""
        modes = {name: stat.S_IFMT(Path(directory, name).lstat().st_mode) for name in names}
        return {name for name, mode in modes.items() if mode not in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK)}

    copy = _link_or_copy if link else shutil.copy2
    shutil.copytree(source, target, symlinks=True, ignore=ignore, copy_function=copy, dirs_exist_ok=True)


def _link_or_copy(source: str, target: str) -> None:
    """Make a hard link to a file, or a copy if the file system cannot."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _flush(directory: Path) -> None:
    """Write a tree to the disk, so that no file is empty after a power failure."""
    for path in (directory, *directory.rglob("*")):
        if not path.is_symlink():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def _exchange(new: Path, path: Path) -> None:
    """Exchange two directories in one step. If the file system cannot, in two steps, which `open_directory` repairs."""
    libc = ctypes.CDLL(None, use_errno=True)
    exchange = getattr(libc, "renameat2", None)
    if exchange and exchange(_AT_FDCWD, os.fsencode(new), _AT_FDCWD, os.fsencode(path), _RENAME_EXCHANGE) == 0:
        return
    old = _sibling(path, "old")
    path.rename(old)
    try:
        new.rename(path)
    except BaseException:
        old.rename(path)
        raise
    shutil.rmtree(old, ignore_errors=True)
