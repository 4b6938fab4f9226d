"""The suite of the libraries for TensorFlow, which runs in its image: see tests/integration/test_library.py."""

from __future__ import annotations

from importlib.util import find_spec

from tests.launching import alone, free_port, mpirun

__all__ = ["alone", "free_port", "mpirun"]

if find_spec("tensorflow") is None:  # nothing here can run, and the integration tests run all of it
    collect_ignore_glob = ["test_*.py"]
