"""What the tests of the libraries for PyTorch have in common."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec

import pytest
from tests.launching import (
    Alone,
    Mpirun,
    Python,
    alone,
    clean_environment,
    free_port,
    mpirun,
    python,
    run,
    start_ranks,
    two_ranks,
)

__all__ = [
    "Alone",
    "Mpirun",
    "Python",
    "alone",
    "clean_environment",
    "free_port",
    "mpirun",
    "python",
    "run",
    "start_ranks",
    "two_ranks",
]

TORCH = tuple(map(int, version("torch").split(".")[:2]))
shards_on_the_cpu = pytest.mark.skipif(TORCH < (2, 1), reason="needs torch 2.1: FSDP of 2.0 asks for a CUDA device")


@pytest.fixture(scope="session")
def preloaded() -> tuple[str, ...]:
    """Torch and what scripts, or torch itself, import later. In an image without scikit-learn, without that."""
    later = ("torch.distributed.fsdp", "torch.distributed.tensor", "torch._dynamo", "sklearn.datasets")
    return ("torch", *(name for name in later if find_spec(name.rpartition(".")[0]) and find_spec(name)))


@pytest.fixture(scope="module")
def model_parallel_rank() -> Iterator[None]:
    """A job of one rank in this process, where other tests may have imported the other library."""
    import smdistributed.modelparallel.torch as smp

    before = dict(os.environ)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        os.environ.pop(name, None)
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(sys.modules, "smdistributed.dataparallel", raising=False)
        smp.init({"partitions": 1})
    yield
    os.environ.clear()
    os.environ.update(before)
