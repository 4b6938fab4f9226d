"""The directory with a job's checkpoints: locked for one command, marked with its job, and replaced as a whole.

Why it is marked, and why a new job does not continue from it: docs/decisions/checkpoints-belong-to-a-job.md.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import itertools
import json
import os
import shutil
import socket
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from shoal import trust
from shoal.clean_text import print_error
from shoal.docker_client import archive
from shoal.errors import UsageError
from shoal.limits import MOST_DEPTH, Room, is_too_deep, walk

MARK = ".shoal-job.json"
"""The file in the directory that names its job. The job itself does not see it."""
_NEW_MARK = f"{MARK}.new"
CONTENT = "checkpoints"
"""The name of the directory in /opt/ml, and in the scratch directory of `replace`."""
_FOUND = "found files"
"""The key in the mark of a directory with files that were there before its first job."""
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of Linux


@dataclass(frozen=True)
class LockedCheckpoints:
    """A directory that this command has locked and marked with its job."""

    path: Path
    job: str
    lock: int
    """A file descriptor. A process that inherits it keeps the lock."""

    def has_files(self) -> bool:
        """Returns whether it has a checkpoint, or any other file."""
        return any(path.name != MARK for path in self.path.iterdir())

    def pack(self, arcname: str, out: IO[bytes], owner: tuple[int, int]) -> None:
        """Writes its content as `arcname`, owned by a user and a group, and rewinds `out`, on this directory's disk.

        Raises `DiskError` if it does not fit.
        """
        archive.pack_tree(self.path, arcname, out, owner, left_out=MARK, room=Room(self.path.parent))

    def copy_to(self, target: Path) -> None:
        """Copies its content to an existing directory. Raises `DiskError` if it does not fit."""
        copy_tree(self.path, target)
        (target / MARK).unlink()

    @contextlib.contextmanager
    def replace(self) -> Iterator[Path]:
        """Replaces the content in one step when the body has ended. An exception leaves the content unchanged.

        Yields a new scratch directory on the same disk. The body makes the new content there, as `CONTENT`, which gets
        the permissions of the directory. Nobody else can enter the scratch directory, which is removed. A crash at any
        moment leaves the old content or the new one.

        Files that were in the directory before its first job stay beside it, with a line on standard error.

        Raises `UsageError` if the directory's mark does not name the job any longer.
        """
        scratch = _sibling(self.path, "new")
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(mode=0o700)
        try:
            yield scratch
            content = scratch / CONTENT
            content.chmod(stat.S_IMODE(self.path.stat().st_mode))
            for name in (MARK, _NEW_MARK):  # a script may have left a directory there
                shutil.rmtree(content / name, ignore_errors=True)
            _write_mark(content, self.job)
            _flush(content)
            mark = _read_mark(self.path / MARK, str(self.path))
            if mark["job"] != self.job:
                raise UsageError(
                    f"{self.path}: became the directory of the job {mark['job']} meanwhile, and nothing was changed."
                    " Fix: name another directory with --checkpoints"
                )
            if mark.get(_FOUND):
                self._keep_found(content)
            else:
                _exchange(content, self.path)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def _keep_found(self, content: Path) -> None:
        """Keeps the directory, with files of the user, beside the new one. Prints a line."""
        kept = self.path.with_name(f"{self.path.name}.before-{self.job}")
        self.path.rename(kept)
        try:
            content.rename(self.path)
        except BaseException:
            kept.rename(self.path)
            raise
        (kept / MARK).unlink()
        print_error(f"the files that were in {self.path} before the job are in {kept}")


@contextlib.contextmanager
def open_directory(path: Path, job: str, option: str, *, can_claim: bool = True) -> Iterator[LockedCheckpoints]:
    """Locks a directory for this command and mark it with a job. It is created if it is missing.

    The lock ends with the process, also if it is killed. The rest of an earlier command that was killed is removed.

    Args:
        option: The option and its value, for messages.
        can_claim: Whether the job may take a directory with files that no job has marked.

    Raises:
        UsageError: If another command uses it, it belongs to another job, it cannot be replaced as a whole, or others
            can write to it. Also if it has files but no mark, and `can_claim` is false.
    """
    path = path.resolve()
    _check_place(path, option)
    path.parent.mkdir(parents=True, exist_ok=True)
    with _lock(path, job, option) as lock:
        _clear_scratch(_sibling(path, "new"), option)
        old = _sibling(path, "old")
        if _has_own_mark(old) and not path.exists():  # killed between the two steps of `_exchange`
            old.rename(path)
        shutil.rmtree(old, ignore_errors=True)
        path.mkdir(exist_ok=True)
        if problem := trust.find_stranger(path):
            raise UsageError(
                f"{option}: {problem}, and so decides what the job continues from. Fix: name another directory, or if"
                f" you trust them: {trust.advise_trust(path)}"
            )
        is_found = _check_owner(path, job, option)
        if is_found and not can_claim and not os.path.lexists(path / MARK):
            raise UsageError(
                f"{option}: {path} has files, but no {MARK} that names the job, so they may not be its checkpoints, and"
                " nothing was changed. Fix: move them to another directory"
            )
        _write_mark(path, job, is_found)
        yield LockedCheckpoints(path, job, lock)


def _clear_scratch(scratch: Path, option: str) -> None:
    """Removes the scratch directory of a command that was killed. Raises `UsageError` if something else is there."""
    shutil.rmtree(scratch, ignore_errors=True)
    if os.path.lexists(scratch):  # a link, a file, or of another user
        raise UsageError(f"{option}: {scratch} was not made by `shoal`. Fix: remove it")


def _sibling(path: Path, suffix: str) -> Path:
    """Returns a path next to a directory, on the same disk."""
    return path.with_name(f".{path.name}.shoal-{suffix}")


def _check_place(path: Path, option: str) -> None:
    if path.exists() and not path.is_dir():
        raise UsageError(f"{option}: not a directory. Fix: name a directory only for checkpoints")
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
    """Yields the descriptor of a locked file, which is removed at the end. A killed command's is not locked."""
    place = _sibling(path, "lock")
    with contextlib.ExitStack() as stack:
        while True:
            file = stack.enter_context(os.fdopen(trust.open_own(place, os.O_RDWR | os.O_CREAT), "r+"))
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
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _describe_use(path: Path, holder: str, job: str, option: str) -> str:
    """Returns the error for a directory that a command with the lock file's text `holder` uses."""
    try:
        found = json.loads(holder)
        who, where = str(found["job"]), f"process {found['process']} on {found['machine']}"
    except (ValueError, TypeError, KeyError):  # it has just been locked
        who, where = "", "unknown process"
    if who == job:
        return f"{option}: the job still runs ({where}). Fix: wait for its end, or `shoal stop`"
    user = who or "another job"
    return f"{option}: {path} is used by {user} ({where}). Fix: wait for its end, or name another directory"


def _check_owner(path: Path, job: str, option: str) -> bool:
    """Returns whether a directory has files that were there before its first job."""
    found = _read_mark(path / MARK, option) if os.path.lexists(path / MARK) else None
    marks = [parent / MARK for parent in path.parents if _has_own_mark(parent)]
    if not found or found["job"] != job:  # otherwise the job has replaced all in it, and its script wrote them
        marks += [
            Path(place, MARK) for place, *names in walk(path) if MARK in itertools.chain(*names) and place != str(path)
        ]
    for mark in marks:
        raise UsageError(
            f"{option}: {mark.parent} has the checkpoints of a job ({MARK}), and a job replaces its directory as a"
            " whole. Fix: name a directory that is not above or below it"
        )
    has_files = any(each.name != MARK for each in path.iterdir())
    if not found:
        return has_files
    owner = found["job"]
    if owner != job and has_files:
        raise UsageError(
            f"{option}: {path} has the checkpoints of the job {owner}, and nothing was changed. Fix: to continue that"
            f" job, use --resume {owner}, or --resume with its --name; for a new job, name another directory. To start"
            f" a new job from these checkpoints, copy the directory, and remove {MARK} from the copy"
        )
    return has_files and bool(found.get(_FOUND))


def _has_own_mark(directory: Path) -> bool:
    """Returns whether a directory has a mark that this user wrote. Anybody can write one to /tmp."""
    try:
        return (directory / MARK).lstat().st_uid in trust.own_ids()
    except OSError:
        return False


def _read_mark(mark: Path, option: str) -> dict[str, Any]:
    try:
        with os.fdopen(trust.open_own(mark, os.O_RDONLY)) as file:
            found = json.load(file)
        return {**found, "job": str(found["job"])}
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise UsageError(
            f"{option}: {mark} does not name a job, or is not your file, so its owner is unknown, and nothing was"
            " changed. Fix: remove that file if the checkpoints are yours"
        ) from error


def _write_mark(directory: Path, job: str, is_found: bool = False) -> None:
    """Writes the mark, and in it whether the directory has files that were there before its first job."""
    text = json.dumps({"job": job, _FOUND: True} if is_found else {"job": job}) + "\n"
    partial = directory / _NEW_MARK
    partial.unlink(missing_ok=True)
    with os.fdopen(trust.open_own(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "w") as file:
        file.write(text)
    partial.replace(directory / MARK)


def copy_tree(source: Path, target: Path, link: bool = False) -> None:
    """Copies files, directories and symbolic links to an existing directory; others, such as sockets, are left out.

    So are directories in more than `MOST_DEPTH` others, with a line on standard error.

    With `link`, files become hard links if both are on one file system, so that no bytes are copied. Absolute
    links into `source` become relative ones. Holes of files stay holes, and still their sizes must fit. Raises
    `DiskError` otherwise.

    A copy belongs to this user, so it has no setuid bit: a program of another user's would become one of this user's.
    """

    def ignore(directory: str, names: list[str]) -> set[str]:
        modes = {name: stat.S_IFMT(Path(directory, name).lstat().st_mode) for name in names}
        kept = {stat.S_IFREG, stat.S_IFLNK}
        if not is_too_deep(directory, source):
            kept.add(stat.S_IFDIR)
        elif stat.S_IFDIR in modes.values():
            print_error(f"warning: {directory}: directories in more than {MOST_DEPTH} others are not copied")
        return {name for name, mode in modes.items() if mode not in kept}

    room = Room(target.parent)

    def copy(source: str | os.DirEntry[str], target: str) -> None:
        if link:
            with contextlib.suppress(OSError):  # the file system cannot
                os.link(source, target)
                return
        room.take(os.fspath(source), Path(source).stat().st_size)
        _copy_file(source, target)

    shutil.copytree(source, target, symlinks=True, ignore=ignore, copy_function=copy, dirs_exist_ok=True)
    _make_links_relative(source, target)


def _make_links_relative(source: Path, target: Path) -> None:
    for directory, *names in walk(target):
        for path in (Path(directory, name) for name in itertools.chain(*names)):
            if path.is_symlink() and path.readlink().is_absolute():
                place = source / path.relative_to(target)
                to = archive.make_relative(str(path.readlink()), str(place.parent), str(source))
                path.unlink()
                path.symlink_to(to)


def _copy_file(source: str | os.DirEntry[str], target: str) -> None:
    with Path(source).open("rb") as content, Path(target).open("xb") as out:
        archive.copy_with_holes(content, out)
    found = Path(source).stat()
    Path(target).chmod(found.st_mode & 0o777)
    archive.set_time(Path(target), found.st_mtime)


def _flush(directory: Path) -> None:
    """Writes a tree to the disk, so that no file is empty after a power failure."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        # The whole file system at once: one by one, a million files would take hours.
        if getattr(ctypes.CDLL(None), "syncfs", lambda _: -1)(descriptor):
            os.sync()
    finally:
        os.close(descriptor)


def _exchange(new: Path, path: Path) -> None:
    """Exchanges two directories in one step, or if the file system cannot, in two, which `open_directory` repairs."""
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


def collect_tree(tree: Path, directory: LockedCheckpoints) -> None:
    """Replaces the checkpoints of a job by those in its tree, which stay there too, as hard links if possible."""
    _add_permissions(tree / CONTENT)
    with directory.replace() as scratch:
        (scratch / CONTENT).mkdir()
        copy_tree(tree / CONTENT, scratch / CONTENT, link=True)


def _add_permissions(root: Path) -> None:
    """Lets this user read, change and remove all files in a directory of a job, as after a job in Docker."""
    _add_permission(root, 0o700)
    for directory, names, files in walk(root):
        for name in names:
            _add_permission(Path(directory, name), 0o700)
        for name in files:
            _add_permission(Path(directory, name), 0o600)


def _add_permission(path: Path, mode: int) -> None:
    """Adds to the permissions of a file or directory, unless it is a link. One that is not this user's is left."""
    with contextlib.suppress(OSError):
        found = path.lstat().st_mode
        if not stat.S_ISLNK(found) and found & mode != mode:
            path.chmod(stat.S_IMODE(found) | mode)
