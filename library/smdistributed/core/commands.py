"""The commands `smddprun`, `smddpsinglenode`, `smddp_singlenode_dev` and `smddpmprun`, which run each rank's command.

    smddprun [-n RANKS] [-x VARIABLE ...] [--rehearse] COMMAND [ARGUMENT ...]
    smddprun --explain
    smddpsinglenode [-x VARIABLE ...] [--rehearse] COMMAND [ARGUMENT ...]
    smddpmprun [-i INSTANCE_TYPE] [--allow-bypass] [--rehearse] COMMAND [ARGUMENT ...]

SageMaker's own toolkit uses them if they are on PATH: `smddprun` on several hosts, `smddpsinglenode` on one.
`--explain` prints the communication engine that a rank's job selects, and why. Run it under the job's launcher; one
rank is enough.
`--rehearse` sets SHOAL_REHEARSE=1: the command runs on CPU with emulated GPUs, by the package `shoal_rehearsal`.

In a rank they change almost nothing: the command replaces them, with the same process ID and streams. For data
parallel training they set SMDATAPARALLEL_LOCAL_RANK. They belong to the library, not to a launcher: a container with
SageMaker's toolkit has only the library.

If no launcher has started ranks, `smddpsinglenode` starts one for each GPU of this host, with mpirun. Published scripts
use it so, in a shell script that SageMaker starts once. Later ones call it `smddp_singlenode_dev`.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from smdistributed.core.explain import explain
from smdistributed.core.launch import LaunchError, is_launched_as_rank, set_local_rank

_NOT_EXECUTABLE, _NOT_FOUND = 126, 127  # as a shell exits
_USAGE = 2
_REHEARSE = ("--rehearse", "", "run on the CPU with emulated GPUs: sets SHOAL_REHEARSE=1")
_EXPORT = "-x", "VARIABLE"
_SINGLE_NODE = ((*_EXPORT, "NAME or NAME=value: pass a variable to the ranks. Repeatable"), _REHEARSE)
OPTIONS: dict[str, tuple[tuple[str, str, str], ...]] = {
    "smddprun": (
        ("-n", "RANKS", "ignored: mpirun, which starts this command, has the number"),
        (*_EXPORT, "ignored: mpirun passes the variables. Repeatable"),
        _REHEARSE,
    ),
    "smddpsinglenode": _SINGLE_NODE,
    "smddp_singlenode_dev": _SINGLE_NODE,
    "smddpmprun": (
        ("-i", "INSTANCE_TYPE", "ignored: for AWS's library"),
        ("--allow-bypass", "", "ignored: for AWS's library"),
        _REHEARSE,
    ),
}
"""The options of each command: the option, the name of its value (empty: none), and its help."""
_ALONE = "Run a command as a rank or, if no launcher started ranks, once for each GPU of this host, with mpirun."
TASKS = {
    "smddprun": "Run the command of a data parallel rank, under mpirun. `smddprun --explain` prints the communication "
    "engine that the job selects, and why.",
    "smddpsinglenode": _ALONE,
    "smddp_singlenode_dev": f"{_ALONE} Another name of smddpsinglenode.",
    "smddpmprun": "Run the command of a model parallel rank, under mpirun.",
}
_GPU_COUNTS = ("SM_NUM_GPUS", "SHOAL_REHEARSE_GPUS")  # the first is `train`'s, in a rehearsal too


def smddprun() -> NoReturn:
    """Sets SMDATAPARALLEL_LOCAL_RANK and replaces this process by the command. `--explain` alone prints facts instead.

    AWS's options are ignored: mpirun, which calls this, has them already. Exits with 2 if the launch environment is
    invalid.
    """
    if sys.argv[1:] == ["--explain"]:
        print(explain())
        sys.exit()
    parser = make_parser("smddprun")
    command = _parse(parser).command
    _set_local_rank(parser)
    _exec(parser, command)


def smddpsinglenode() -> NoReturn:
    """Replaces this process by the command, or by mpirun with a `smddprun` for each GPU of this host.

    The first happens in a rank, and on a host with fewer than two GPUs. In a rank it sets SMDATAPARALLEL_LOCAL_RANK.
    `-x` is passed to mpirun. Exits with 2 if the options or the launch environment are invalid.
    """
    _single_node("smddpsinglenode")


def smddp_singlenode_dev() -> NoReturn:
    """Does the same as `smddpsinglenode`."""
    _single_node("smddp_singlenode_dev")


def smddpmprun() -> NoReturn:
    """Replaces this process by the command. `-i` and `--allow-bypass` are for AWS's library and are ignored."""
    parser = make_parser("smddpmprun")
    _exec(parser, _parse(parser).command)


def _single_node(name: str) -> NoReturn:
    parser = make_parser(name)
    options = _parse(parser)
    ranks = _count_gpus(parser)
    try:
        alone = ranks < 2 or is_launched_as_rank(os.environ)
    except LaunchError as error:
        _refuse(parser, str(error))
    if alone:
        _set_local_rank(parser)
        _exec(parser, options.command)
    exported = [word for variable in options.x or () for word in ("-x", variable)]
    this = Path(sys.argv[0])  # of a virtual environment that may not be activated
    program = shutil.which("mpirun") or str(this.with_name("mpirun"))
    each = str(this.with_name("smddprun"))
    # There may be more emulated GPUs than cores, of which mpirun gives each rank one.
    mpirun = [program, "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", str(ranks)]
    _exec(parser, [*mpirun, *exported, each, *options.command])


def _count_gpus(parser: argparse.ArgumentParser) -> int:
    """Returns the number of GPUs here: SM_NUM_GPUS, SHOAL_REHEARSE_GPUS (exits with 2 if invalid), or device files."""
    for name in _GPU_COUNTS:
        if text := os.environ.get(name):
            if not text.isdecimal():
                _refuse(parser, f"{name}={text!r} is invalid: it must be the number of GPUs of this host")
            return int(text)
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def _set_local_rank(parser: argparse.ArgumentParser) -> None:
    """Sets SMDATAPARALLEL_LOCAL_RANK if a launcher started this process. Exits with 2 if its environment is invalid."""
    try:
        set_local_rank(os.environ)
    except LaunchError as error:
        _refuse(parser, str(error))


def _refuse(parser: argparse.ArgumentParser, problem: str) -> NoReturn:
    print(f"{parser.prog}: {problem}", file=sys.stderr)
    sys.exit(_USAGE)


def make_parser(name: str) -> argparse.ArgumentParser:
    """Makes the parser of a command in `OPTIONS`. `command` gets the rest of the arguments."""
    options = OPTIONS[name]
    usage = " ".join(f"[{' '.join(filter(None, (option, metavar)))}]" for option, metavar, _ in options)
    parser = argparse.ArgumentParser(name, f"{name} {usage} COMMAND [ARGUMENT ...]", TASKS[name], allow_abbrev=False)
    for option, metavar, text in options:
        if not metavar:
            parser.add_argument(option, action="store_true", help=text)
        elif option == "-n":
            parser.add_argument(option, metavar=metavar, type=int, help=text)
        else:
            parser.add_argument(option, metavar=metavar, action="append" if option == "-x" else "store", help=text)
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the command of a rank, and its arguments")
    return parser


def _parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parses sys.argv; `--rehearse` sets SHOAL_REHEARSE. Exits with 2 if something is wrong or missing."""
    options = parser.parse_args(sys.argv[1:])
    if options.rehearse:
        if importlib.util.find_spec("shoal_rehearsal") is None:
            parser.error(
                "--rehearse needs the package shoal-rehearsal, which is not installed. Fix: install its wheel, which"
                " `make wheels` of Shoal builds"
            )
        os.environ["SHOAL_REHEARSE"] = "1"
    if not options.command:
        parser.error("the command is missing. Fix: add the command of a rank, for example: python train.py")
    return options


def _exec(parser: argparse.ArgumentParser, command: Sequence[str]) -> NoReturn:
    """Replaces this process by the command. If it cannot, exits with 127 (not found) or 126, as a shell does."""
    try:
        os.execvp(command[0], list(command))
    except OSError as error:
        print(f"{parser.prog}: {command[0]} cannot be started: {error.strerror}", file=sys.stderr)
        sys.exit(_NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_EXECUTABLE)
