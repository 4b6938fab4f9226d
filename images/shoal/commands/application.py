"""Runs a command of `shoal.commands`, and gives each kind of failure its words and exit code."""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys

import docker.errors
import requests
import urllib3.exceptions

from shoal.builds.noop_cache import BuildCommand
from shoal.commands import completion
from shoal.commands.common import app
from shoal.errors import DockerError, ShoalError, convert_os_error

_MODULES = ("dependencies", "images", "inspection", "jobs", "setup")
"""The modules that define commands; importing one adds its commands to `app`."""
_IMAGE_COMMANDS = frozenset({"build", "list", "plan", "render"})
"""The commands in the module `images`. Importing the other modules takes longer than running these commands."""


def main(command: BuildCommand | None) -> None:
    """Run the command line; every expected failure prints its text and exits with its own code.

    `command` is the build whose answer may be saved. SIGTERM and SIGHUP end a command as an interrupt does: what runs
    is stopped and removed on the way out.
    """
    completion.join_words(os.environ)
    for module in ("images",) if _IMAGE_COMMANDS & {*sys.argv[1:2]} else _MODULES:
        importlib.import_module(f"shoal.commands.{module}")
    _hear()
    gc.freeze()
    gc.enable()
    try:
        app(standalone_mode=True, obj=command)
    except Exception as error:
        told = _told(error)
        if told is None:  # a defect of ours, which its traceback tells best
            raise
        print(f"shoal: {told}", file=sys.stderr)
        sys.exit(told.exit_code)


def _told(error: Exception) -> ShoalError | None:
    """Return the words and the exit code of a failure that a user can act on; None for any other."""
    if isinstance(error, ShoalError):
        return error
    if isinstance(error, docker.errors.APIError):
        return DockerError(f"the engine refused: {error.explanation or error}")
    # Before the system's: what requests raises is of that kind too.
    if isinstance(error, docker.errors.DockerException | requests.RequestException | urllib3.exceptions.HTTPError):
        return DockerError(f"the engine could not be asked: {error}")
    return convert_os_error(error) if isinstance(error, OSError) else None


def _hear() -> None:
    """Have the signals that end a process end a command, which stops and removes what runs."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end)


def _end(number: int, _frame: object) -> None:
    sys.exit(128 + number)
