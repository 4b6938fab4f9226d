"""Failures that a user can act on. `main` prints their text, which says what, where and how to fix it.

Each class has its own exit code. docs/exit-codes.md lists them with their docstrings. This module also converts errors
of the system to them, and suggests similar words.
"""

from __future__ import annotations

import difflib
import errno
import re
from collections.abc import Iterable


class ShoalError(Exception):
    """Any other failure. With a Python traceback, it is a bug in Shoal.

    Fix: report it
    """

    exit_code = 1

    def split_fix(self) -> tuple[str, str]:
        """Returns the problem and the fix, each on one line; the fix is empty if the message has none."""
        problem, *fix = re.split(r" Fix: ", " ".join(str(self).split()), maxsplit=1)
        return problem.rstrip("."), "".join(fix)


class UsageError(ShoalError):
    """The command line has an unknown option, image, file or checkout.

    Fix: `shoal --help`, `shoal list`
    """

    exit_code = 2


class SpecError(ShoalError):
    """`buildspec.yml`, `versions.yml`, a template or a lock file is wrong, or a Dockerfile is stale.

    Fix: the message names file and line; `shoal lock`, `shoal render`
    """

    exit_code = 3


class DockerError(ShoalError):
    """Docker does not answer, or refuses a request.

    Fix: `shoal doctor --fix`
    """

    exit_code = 4


class DiskError(ShoalError):
    """The disk has too little space, before or during a build, or for a file.

    Fix: `docker system df`, `docker builder prune`; the message names the file
    """

    exit_code = 5


class BuildError(ShoalError):
    """A step of a build failed.

    Fix: read the last lines in the message, and the log file that it names
    """

    exit_code = 6


class BaseImageError(ShoalError):
    """No base image could be pulled, or made from a Debian mirror.

    Fix: `shoal doctor`, which checks both ways
    """

    exit_code = 7


class TraceError(ShoalError):
    """A file is not a timeline, or files are from different jobs.

    Fix: name timelines of one job (docs/timeline.md)
    """

    exit_code = 8


class ImageError(ShoalError):
    """Docker does not have the image, it cannot be read, or it has no program to start.

    Fix: `shoal build`
    """

    exit_code = 9


class DoctorError(ShoalError):
    """A check of `shoal doctor` failed.

    Fix: each failed check prints its fix
    """

    exit_code = 10


class PushError(ShoalError):
    """A registry or the network refused an image, or Docker stopped during the push.

    Fix: `docker login`, the registry's message, or `shoal doctor`
    """

    exit_code = 11


class VulnerabilityError(ShoalError):
    """`shoal audit` found vulnerabilities that the allow-list does not accept.

    Fix: a newer release, or `--allow`
    """

    exit_code = 12


class FileError(ShoalError):
    """A file or directory cannot be read or written.

    Fix: the message names it; check permissions, and whether the file system is read-only
    """

    exit_code = 13


class DifferenceError(ShoalError):
    """`shoal diff --check`: two images differ in ways that two builds of one commit do not.

    Fix: build both from one commit and one base (docs/size.md)
    """

    exit_code = 14


class BundleError(ShoalError):
    """The files of a bundle have changed since it was made.

    Fix: copy the bundle again (docs/offline.md)
    """

    exit_code = 15


class CoverageError(ShoalError):
    """`shoal audit` found no vulnerabilities, but did not check packages that the allow-list does not accept.

    Fix: a report about all packages, or `--allow`
    """

    exit_code = 16


class OutdatedError(ShoalError):
    """`shoal upgrade --check` found newer releases.

    Fix: `shoal upgrade`
    """

    exit_code = 17


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
    """Returns whether the disk is full or the user's quota is used up."""
    return error.errno in _FULL


def convert_os_error(error: OSError) -> ShoalError | None:
    """Returns the error that a user sees for `error`.

    Returns:
        `DiskError` if the disk is full, `FileError` if the error names a file, otherwise None, because it is a defect.
    """
    reason = error.strerror or type(error).__name__
    if is_disk_full(error):
        place = f"{error.filename}: " if error.filename else ""
        return DiskError(f"{place}{reason}. Fix: free space (df shows which disk is full), or choose another path")
    if error.filename is None:
        return None
    fix = None if " Fix: " in reason else _FIXES.get(error.errno or 0)
    return FileError(f"{error.filename}: {reason}{f'. Fix: {fix}' if fix else ''}")


def did_you_mean(word: str, known: Iterable[str], limit: int = 1, cutoff: float = 0.5) -> str:
    """Returns ` Did you mean 'x'?` with the most similar of `known`, or an empty string.

    Args:
        word: The word that was not found.
        known: The words that would have been accepted.
        limit: How many suggestions to give at most, closest first.
        cutoff: The least similarity, from 0 (anything) to 1 (equal).
    """
    close = difflib.get_close_matches(word, list(known), n=limit, cutoff=cutoff)
    return f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
