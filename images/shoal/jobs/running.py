"""Marks a job's directory while a command runs the job, and remembers the directories of all jobs of this user.

The mark is a locked file, so it ends with the command, also if that is killed. The directories are remembered as links
in $XDG_STATE_HOME/shoal/jobs, by default ~/.local/state/shoal/jobs, one directory for each machine. A link's name is
made of the directory and the key of its job. Only a job with a link counts as this user's: a record says what is
mounted, replaced and ended, and anybody can write one.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import math
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from shoal import trust
from shoal.clean_text import print_error
from shoal.errors import UsageError

MARK = ".running"
_PATIENCE = 2.0
"""Seconds in which other commands that look at the mark give it free again."""
_GRACE = 10.0
"""Seconds in which the system gives the mark of a process free that has ended."""
_PAUSE = 0.02


@contextlib.contextmanager
def mark_running(directory: Path, key: str) -> Iterator[None]:
    """Marks a job's directory as one that this process runs, and remembers it. The mark is removed at the end.

    The caller has locked the job's checkpoints. Raises `UsageError` if another command runs the job with others.
    """
    mark = directory / MARK
    with os.fdopen(trust.open_own(mark, os.O_WRONLY | os.O_CREAT), "w") as file:
        until = time.monotonic() + _PATIENCE
        while not _try_lock(file.fileno(), fcntl.LOCK_EX):
            if time.monotonic() > until:
                raise UsageError(
                    f"{directory.name}: another command runs this job. Fix: shoal stop {directory}, or wait for its end"
                )
            time.sleep(_PAUSE)
        try:
            _remember(directory, key)
            yield
        finally:
            mark.unlink(missing_ok=True)


def is_running(directory: Path) -> bool:
    """Returns whether a command of this user runs the job with this directory."""
    try:
        with os.fdopen(trust.open_own(directory / MARK, os.O_RDONLY)) as file:
            return not _try_lock(file.fileno(), fcntl.LOCK_SH)
    except OSError:
        return False


def wait_for_end(directory: Path, is_alive: Callable[[], bool] = lambda: True) -> None:
    """Waits until no command runs the job with this directory.

    Args:
        is_alive: Returns whether the process of the job's command exists.

    Raises:
        UsageError: If that process has ended, and the mark stays locked for some seconds.
    """
    until = math.inf
    while is_running(directory):
        if is_alive():
            until = math.inf
        elif time.monotonic() > (until := min(until, time.monotonic() + _GRACE)):
            raise UsageError(
                f"{directory.name}: its command has ended, but another process has locked {directory / MARK}. Fix: end"
                f" the process that `fuser {directory / MARK}` shows"
            )
        time.sleep(_PAUSE)


def _try_lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def state_directory() -> Path:
    """Returns the directory of this user's state, which may be missing. It has one for each machine.

    Machines may share a home directory.
    """
    base = Path(os.environ.get("XDG_STATE_HOME", ""))
    # As the standard says, a relative path does not count.
    return (base if base.is_absolute() else Path.home() / ".local" / "state") / "shoal"


def _jobs_directory() -> Path:
    return state_directory() / "jobs"


def _link_name(directory: Path, key: str) -> str:
    return hashlib.sha256(os.fsencode(directory) + b"\0" + os.fsencode(key)).hexdigest()[:32]


def _remember(directory: Path, key: str) -> None:
    """Makes a link to a job's directory. Prints a warning if other commands will not take the job for this user's."""
    links = _jobs_directory() / socket.gethostname()
    link = links / _link_name(directory, key)
    fix = f"Fix: {trust.advise_trust(directory)}"
    try:
        links.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            link.symlink_to(directory)
        problem = trust.find_stranger(directory) or trust.find_stranger(links)
    except OSError as error:
        problem, fix = f"{link} cannot be written ({error.strerror})", f"{fix}, or set XDG_STATE_HOME"
    if problem:
        print_error(f"warning: {problem}, so `shoal ps` and `shoal stop` refuse this job. {fix}")


def list_directories() -> list[Path]:
    """Returns the directories of this user's jobs on this machine. Links to those that were removed are removed too.

    Nothing is read or removed if others can write to the list, or have put a link to other files in its place.
    """
    found: list[Path] = []
    links = _jobs_directory() / socket.gethostname()
    with contextlib.suppress(FileNotFoundError):
        if trust.find_stranger(links):
            return found
        for link in [each for each in links.iterdir() if each.is_symlink()]:
            if link.is_dir():
                found.append(link.readlink())
            else:
                link.unlink(missing_ok=True)
    return found


def check_own(directory: Path, key: str, option: str) -> None:
    """Raises `UsageError` unless the job in a directory is this user's.

    This user's list of jobs must have it with its key, and no other user may be able to change its files. A list of
    another machine with the same home directory counts too. If the user has named the job's directory with `shoal
    trust`, it is accepted without both.

    Args:
        key: The key of the job, from its record.
        option: The option or the job's name, for messages.
    """
    place, named = directory.resolve(), trust.read_trusted()
    if str(place) in named:
        return
    if problem := _find_problem(place, key, named):
        raise UsageError(
            f"{option}: {place} is not a job of yours: {problem}. The record of a job says what is run, mounted,"
            " replaced and ended, so nothing was done. Fix: if it is yours, such as one that you have moved or copied"
            f" here: {trust.advise_trust(place)}"
        )


def _find_problem(directory: Path, key: str, named: set[str]) -> str | None:
    if not trust.is_inside(directory, named):
        if words := trust.find_stranger(directory):
            return words
        for entry in os.scandir(directory):
            if words := trust.describe_stranger(entry.path, entry.stat(follow_symlinks=False)):
                return words
    state = _jobs_directory()
    links = state.glob(f"*/{_link_name(directory, key)}")
    if any(link.is_symlink() and trust.find_stranger(link.parent) is None for link in links):
        return None
    return f"your list of jobs ({state}) does not have it"
