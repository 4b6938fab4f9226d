"""The command `shoal`: runs a command of `shoal.commands`, and gives each kind of failure its words and exit code."""

from __future__ import annotations

import os
import signal
import sys

import docker.errors
import requests

from shoal.commands import beginning, building, completion, looking, running
from shoal.commands.common import app
from shoal.errors import EngineError, ShoalError

__all__ = ["app", "beginning", "building", "looking", "main", "running"]


def main() -> None:
    """Run the command line; every expected failure prints its text and exits with its own code.

    SIGTERM and SIGHUP end it as an interrupt does: what runs is stopped and removed on the way out.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end)
    completion.join_words(os.environ)
    try:
        app(standalone_mode=True)
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
