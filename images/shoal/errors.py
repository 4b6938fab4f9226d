"""Failures a user can act on: each kind owns its exit code, and its text says what, where and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ShoalError(Exception):
    """Base of all expected failures; `main` prints it and exits with `exit_code`."""

    exit_code = 1


class UsageError(ShoalError):
    """The command line asks for something that does not exist."""

    exit_code = 2


class SpecError(ShoalError):
    """buildspec.yml, a template or a lock file is wrong."""

    exit_code = 3


class EngineError(ShoalError):
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


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ` Did you mean 'x'?` for the closest of `known`, or an empty string."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""
