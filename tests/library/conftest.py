"""What the tests of the libraries for PyTorch have in common."""

from __future__ import annotations

from importlib.metadata import version

import pytest
from tests.launching import Alone, Mpirun, alone, clean_environment, free_port, mpirun, run

__all__ = ["Alone", "Mpirun", "alone", "clean_environment", "free_port", "mpirun", "run"]

TORCH = tuple(map(int, version("torch").split(".")[:2]))
shards_on_the_cpu = pytest.mark.skipif(TORCH < (2, 1), reason="needs torch 2.1: FSDP of 2.0 asks for a CUDA device")
