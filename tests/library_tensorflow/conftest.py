"""The suite of the libraries for TensorFlow, which runs in its image: see tests/integration/test_library.py."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from tests.launching import alone, free_port, mpirun, python, start_ranks, two_ranks

__all__ = ["alone", "free_port", "mpirun", "python", "start_ranks", "two_ranks"]

if find_spec("tensorflow") is None:  # nothing here can run, and the integration tests run all of it
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def preloaded() -> tuple[str, ...]:
    return ("tensorflow",)
