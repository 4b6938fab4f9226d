"""Runs a command of `shoal.commands`, and gives each kind of failure its words and exit code."""

from __future__ import annotations

import importlib
import os
import signal
import sys

import docker.errors
import requests

from shoal.build.unchanged import Question
from shoal.commands import completion
from shoal.commands.common import app
from shoal.errors import EngineError, ShoalError

_ROOMS = ("beginning", "building", "looking", "running")
"""The modules with commands; importing one adds its own to `app`."""
_BUILDING = frozenset({"build", "bundle", "list", "lock", "plan", "push", "render"})
"""The commands of that module. What the others import takes longer than these commands themselves."""


def main(asked: Question | None) -> None:
    """Run the command line; every expected failure prints its text and exits with its own code.

    `asked` is what `build` may remember the answer to. SIGTERM and SIGHUP end a command as an interrupt does: what runs
    is stopped and removed on the way out.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end)
    completion.join_words(os.environ)
    for room in ("building",) if _BUILDING & {*sys.argv[1:2]} else _ROOMS:
        importlib.import_module(f"shoal.commands.{room}")
    try:
        app(standalone_mode=True, obj=asked)
    except ShoalError as error:
        print(f"shoal: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except docker.errors.APIError as error:
        print(f"shoal: the engine refused: {error.explanation or error}", file=sys.stderr)
        sys.exit(EngineError.exit_code)
    except (docker.errors.DockerException, requests.RequestException) as error:
        print(f"shoal: the engine could not be asked: {error}", file=sys.stderr)
        sys.exit(EngineError.exit_code)


def _end(number: int, _frame: object) -> None:
    sys.exit(128 + number)
