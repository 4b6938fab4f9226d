"""`smddprun`, `smddpsinglenode`, `smddp_singlenode_dev` and `smddpmprun`: what is put before each rank's command.

    smddprun [-n RANKS] [-x VARIABLE ...] [--rehearse] COMMAND [ARGUMENT ...]
    smddprun --explain
    smddpsinglenode [-x VARIABLE ...] [--rehearse] COMMAND [ARGUMENT ...]
    smddpmprun [-i INSTANCE_TYPE] [--allow-bypass] [--rehearse] COMMAND [ARGUMENT ...]

SageMaker's own toolkit uses them where they are on PATH: `smddprun` on several hosts, `smddpsinglenode` on one.
`--explain` prints which engine a rank's job chooses, and why (run it under the job's launcher, one rank is enough).
`--rehearse` sets SHOAL_REHEARSE=1: the command runs without GPUs (the package `shoal_rehearsal`).

In a rank they are transparent: this library prepares nothing outside the rank, so the command takes their place, with
the same process ID and streams; those of data parallelism add SMDATAPARALLEL_LOCAL_RANK to the environment. They belong
to the library, not to a launcher: a container that brings SageMaker's toolkit has the library alone.

Where no launcher has started ranks, `smddpsinglenode` does, one for each GPU of this host, by mpirun: so published
scripts use it, in a shell script that SageMaker starts once. `smddp_singlenode_dev` is its name in later ones.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from smdistributed.core.explain import explain
from smdistributed.core.launch import LaunchError, is_rank, name_local_rank

# As a shell says it.
_NOT_EXECUTABLE, _NOT_FOUND = 126, 127
_USAGE = 2
_GPU_COUNTS = ("SM_NUM_GPUS", "SHOAL_REHEARSE_GPUS")  # the first is `train`'s, in a rehearsal too


def smddprun() -> NoReturn:
    """Become the command; AWS's options are taken and dropped: mpirun, which calls this, has been told the same."""
    if sys.argv[1:] == ["--explain"]:
        print(explain())
        sys.exit()
    parser = _parser("smddprun", "[-n RANKS] [-x VARIABLE ...] ")
    parser.add_argument("-n", metavar="RANKS", type=int)
    parser.add_argument("-x", metavar="VARIABLE", action="append")
    command = _parse(parser).command
    _name_local_rank(parser)
    _become(parser, command)


def smddpsinglenode() -> NoReturn:
    """Become the command in a rank, else start one on each GPU of this host; `-x` is then mpirun's."""
    _single_node("smddpsinglenode")


def smddp_singlenode_dev() -> NoReturn:
    """As `smddpsinglenode`."""
    _single_node("smddp_singlenode_dev")


def smddpmprun() -> NoReturn:
    """Become the command; the options, which concern AWS's library, are taken and dropped."""
    parser = _parser("smddpmprun", "[-i INSTANCE_TYPE] [--allow-bypass] ")
    parser.add_argument("-i", metavar="INSTANCE_TYPE")
    parser.add_argument("--allow-bypass", action="store_true")
    _become(parser, _parse(parser).command)


def _single_node(name: str) -> NoReturn:
    parser = _parser(name, "[-x VARIABLE ...] ")
    parser.add_argument("-x", metavar="VARIABLE", action="append", default=[])
    options = _parse(parser)
    ranks = _count_gpus(parser)
    try:
        alone = ranks < 2 or is_rank(os.environ)
    except LaunchError as error:
        _refuse(parser, str(error))
    if alone:
        _name_local_rank(parser)
        _become(parser, options.command)
    exported = [word for variable in options.x for word in ("-x", variable)]
    beside = Path(sys.argv[0])  # of a virtual environment that may not be activated
    program = shutil.which("mpirun") or str(beside.with_name("mpirun"))
    each = str(beside.with_name("smddprun"))
    # Emulated GPUs may be more than cores, which mpirun takes for the places of ranks.
    mpirun = [program, "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", str(ranks)]
    _become(parser, [*mpirun, *exported, each, *options.command])


def _count_gpus(parser: argparse.ArgumentParser) -> int:
    """The GPUs of this host, as `train` or a rehearsal counts them, else by their device nodes."""
    for name in _GPU_COUNTS:
        if text := os.environ.get(name):
            if not text.isdecimal():
                _refuse(parser, f"{name}={text!r} must be a whole number, the GPUs of this host")
            return int(text)
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def _name_local_rank(parser: argparse.ArgumentParser) -> None:
    try:
        name_local_rank(os.environ)
    except LaunchError as error:
        _refuse(parser, str(error))


def _refuse(parser: argparse.ArgumentParser, problem: str) -> NoReturn:
    print(f"{parser.prog}: {problem}", file=sys.stderr)
    sys.exit(_USAGE)


def _parser(name: str, options: str) -> argparse.ArgumentParser:
    usage = f"{name} {options}[--rehearse] COMMAND [ARGUMENT ...]"
    parser = argparse.ArgumentParser(name, usage, allow_abbrev=False)
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    return parser


def _parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Read the command line; `--rehearse` takes effect."""
    options = parser.parse_args(sys.argv[1:])
    if options.rehearse:
        os.environ["SHOAL_REHEARSE"] = "1"
    if not options.command:
        parser.error("no command is given. Name what a rank runs, such as: python train.py")
    return options


def _become(parser: argparse.ArgumentParser, command: Sequence[str]) -> NoReturn:
    try:
        os.execvp(command[0], list(command))
    except OSError as error:
        print(f"{parser.prog}: {command[0]} cannot be started: {error.strerror}", file=sys.stderr)
        sys.exit(_NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_EXECUTABLE)
