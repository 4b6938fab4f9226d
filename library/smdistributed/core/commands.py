"""`smddprun`, `smddpsinglenode` and `smddpmprun`: what is put before each rank's command.

    smddprun [--rehearse] COMMAND [ARGUMENT ...]
    smddpsinglenode [--rehearse] COMMAND [ARGUMENT ...]
    smddpmprun [-i INSTANCE_TYPE] [--allow-bypass] [--rehearse] COMMAND [ARGUMENT ...]

SageMaker's own toolkit uses them where they are on PATH: `smddprun` on several hosts, `smddpsinglenode` on one.
`--rehearse` sets SHOAL_REHEARSE=1: the command runs without GPUs (see `smdistributed.rehearsal`).

They are transparent: this library prepares nothing outside the rank, so the command takes their place, with the same
process ID, environment and streams. They belong to the library, not to a launcher: a container that brings SageMaker's
toolkit has the library alone.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

# As a shell says it.
_NOT_EXECUTABLE, _NOT_FOUND = 126, 127


def smddprun() -> NoReturn:
    """Become the command."""
    _become(_parser("smddprun", ""), sys.argv[1:])


def smddpsinglenode() -> NoReturn:
    """Become the command."""
    _become(_parser("smddpsinglenode", ""), sys.argv[1:])


def smddpmprun() -> NoReturn:
    """Become the command; the options, which concern AWS's library, are taken and dropped."""
    parser = _parser("smddpmprun", "[-i INSTANCE_TYPE] [--allow-bypass] ")
    parser.add_argument("-i", metavar="INSTANCE_TYPE")
    parser.add_argument("--allow-bypass", action="store_true")
    _become(parser, sys.argv[1:])


def _parser(name: str, options: str) -> argparse.ArgumentParser:
    usage = f"{name} {options}[--rehearse] COMMAND [ARGUMENT ...]"
    parser = argparse.ArgumentParser(name, usage, allow_abbrev=False)
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    return parser


def _become(parser: argparse.ArgumentParser, words: Sequence[str]) -> NoReturn:
    options = parser.parse_args(words)
    command: list[str] = options.command
    if options.rehearse:
        os.environ["SHOAL_REHEARSE"] = "1"
    if not command:
        parser.error("no command is given. Name what a rank runs, such as: python train.py")
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{parser.prog}: {command[0]} cannot be started: {error.strerror}", file=sys.stderr)
        sys.exit(_NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_EXECUTABLE)
