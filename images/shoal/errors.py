"""Failures a user can act on: each kind owns its exit code, and its text says what, where and what to do."""

from __future__ import annotations

import difflib
import errno
from collections.abc import Iterable


class ShoalError(Exception):
    """Base of all expected failures; `main` prints it and exits with `exit_code`, which docs/exit-codes.md lists."""

    exit_code = 1


class UsageError(ShoalError):
    """The command line asks for something that does not exist."""

    exit_code = 2


class SpecError(ShoalError):
    """buildspec.yml, a template or a lock file is wrong."""

    exit_code = 3


class DockerError(ShoalError):
    """No Docker Engine answers, or it refuses."""

    exit_code = 4


class DiskError(ShoalError):
    """Too little space on the disk."""

    exit_code = 5


class BuildError(ShoalError):
    """A step of a build failed."""

    exit_code = 6


class BaseImageError(ShoalError):
    """No base image could be pulled or bootstrapped."""

    exit_code = 7


class TraceError(ShoalError):
    """A file is not a timeline, or files do not belong together."""

    exit_code = 8


class ImageError(ShoalError):
    """An archive is not an image, or one that cannot be read."""

    exit_code = 9


class DoctorError(ShoalError):
    """A check of `shoal doctor` failed."""

    exit_code = 10


class PushError(ShoalError):
    """A registry, or the way to it, refuses an image."""

    exit_code = 11


class VulnerableError(ShoalError):
    """What is inside an image has known vulnerabilities that nobody has accepted."""

    exit_code = 12


class FileError(ShoalError):
    """A file or directory of this machine cannot be read or written."""

    exit_code = 13


class DifferenceError(ShoalError):
    """Two images differ in what two builds of one commit do not."""

    exit_code = 14


class BundleError(ShoalError):
    """A bundle's files are not those that it was made with."""

    exit_code = 15


_FULL = (errno.ENOSPC, errno.EDQUOT)
_ADVICE = {
    errno.EACCES: "give this user access to it, or name another place",
    errno.EPERM: "give this user access to it, or name another place",
    errno.EROFS: "name a place on a file system that can be written",
    errno.ENOENT: "see that it is there, and the directory that it is in",
    errno.ENOTDIR: "name a directory; a part of this is a file",
    errno.EISDIR: "name a file; this is a directory",
}


def is_full(error: OSError) -> bool:
    """Return whether it says that a disk, or this user's part of it, is full."""
    return error.errno in _FULL


def of_system(error: OSError) -> ShoalError | None:
    """Return what the system's refusal is to a user; None for one that names no file, unless a disk is full."""
    words = error.strerror or type(error).__name__
    if is_full(error):
        where = f"{error.filename}: " if error.filename else ""
        return DiskError(f"{where}{words}. What to do: free some (df shows which disk is full), or name another place")
    if error.filename is None:
        return None
    advice = _ADVICE.get(error.errno or 0)
    return FileError(f"{error.filename}: {words}{f'. What to do: {advice}' if advice else ''}")


def did_you_mean(word: str, known: Iterable[str], limit: int = 1, cutoff: float = 0.5) -> str:
    """Return ` Did you mean 'x'?` for up to `limit` of `known`, closest first, or an empty string.

    `cutoff` is how alike they must be: 0 is anything, 1 is equal.
    """
    close = difflib.get_close_matches(word, list(known), n=limit, cutoff=cutoff)
    return f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
