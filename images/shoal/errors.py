"""Failures that a user can act on. Each class has its own exit code; its text says what, where and how to fix it.

It also converts errors of the system to them, and suggests similar words.
"""

from __future__ import annotations

import difflib
import errno
import re
from collections.abc import Iterable


class ShoalError(Exception):
    """Base of all expected failures; `main` prints it and exits with `exit_code`, which docs/exit-codes.md lists."""

    exit_code = 1

    def split_fix(self) -> tuple[str, str]:
        """Return the problem and the fix, each on one line; the fix is empty if the message has none."""
        problem, *fix = re.split(r" Fix: ", " ".join(str(self).split()), maxsplit=1)
        return problem.rstrip("."), "".join(fix)


class UsageError(ShoalError):
    """The command line asks for something that does not exist."""

    exit_code = 2


class SpecError(ShoalError):
    """buildspec.yml, a template or a lock file is wrong."""

    exit_code = 3


class DockerError(ShoalError):
    """Docker does not answer, or refuses a request."""

    exit_code = 4


class DiskError(ShoalError):
    """The disk has too little space."""

    exit_code = 5


class BuildError(ShoalError):
    """A step of a build failed."""

    exit_code = 6


class BaseImageError(ShoalError):
    """No base image could be pulled or bootstrapped."""

    exit_code = 7


class TraceError(ShoalError):
    """A file is not a timeline, or files are not from the same job."""

    exit_code = 8


class ImageError(ShoalError):
    """An image is missing, an archive is not an image, or its contents cannot be read."""

    exit_code = 9


class DoctorError(ShoalError):
    """A check of `shoal doctor` failed."""

    exit_code = 10


class PushError(ShoalError):
    """A registry refuses an image, or cannot be reached."""

    exit_code = 11


class VulnerabilityError(ShoalError):
    """An image contains known vulnerabilities that the allow-list does not accept."""

    exit_code = 12


class FileError(ShoalError):
    """A local file or directory cannot be read or written."""

    exit_code = 13


class DifferenceError(ShoalError):
    """Two images differ in ways that two builds of one commit do not."""

    exit_code = 14


class BundleError(ShoalError):
    """The files of a bundle have changed since it was made."""

    exit_code = 15


_FULL = (errno.ENOSPC, errno.EDQUOT)
_FIXES = {
    errno.EACCES: "give your user access to it, or choose another path",
    errno.EPERM: "give your user access to it, or choose another path",
    errno.EROFS: "choose a path on a writable file system",
    errno.ENOENT: "check that the path and its parent directory exist",
    errno.ENOTDIR: "choose a directory; part of this path is a file",
    errno.EISDIR: "choose a file; this is a directory",
}


def is_disk_full(error: OSError) -> bool:
    """Return whether the disk is full or the user's quota is used up."""
    return error.errno in _FULL


def convert_os_error(error: OSError) -> ShoalError | None:
    """Return the error that a user sees for `error`.

    Returns:
        `DiskError` if the disk is full, `FileError` if the error names a file, otherwise None, because it is a defect.
    """
    reason = error.strerror or type(error).__name__
    if is_disk_full(error):
        place = f"{error.filename}: " if error.filename else ""
        return DiskError(f"{place}{reason}. Fix: free space (df shows which disk is full), or choose another path")
    if error.filename is None:
        return None
    fix = _FIXES.get(error.errno or 0)
    return FileError(f"{error.filename}: {reason}{f'. Fix: {fix}' if fix else ''}")


def did_you_mean(word: str, known: Iterable[str], limit: int = 1, cutoff: float = 0.5) -> str:
    """Return ` Did you mean 'x'?` with the most similar of `known`, or an empty string.

    Args:
        word: The word that was not found.
        known: The words that would have been accepted.
        limit: How many suggestions to give at most, closest first.
        cutoff: The least similarity, from 0 (anything) to 1 (equal).
    """
    close = difflib.get_close_matches(word, list(known), n=limit, cutoff=cutoff)
    return f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
