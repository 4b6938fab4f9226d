"""Jobs of `train` on this machine's GPUs; without one, on emulated GPUs (a rehearsal): every machine tries them.

Two ranks share a single GPU. `train` refuses more ranks than GPUs; NVIDIA_VISIBLE_DEVICES hides the GPU from its count.
"""

from __future__ import annotations

import os
import socket
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

from tests.toolkit.conftest import Run, Tree, run, tree
from tests.toolkit.test_imports import REHEARSAL, TOOLKIT, packages

__all__ = ["Run", "Tree", "packages", "run", "tree"]

IS_REAL = torch.cuda.is_available()
GPUS = torch.cuda.device_count() if IS_REAL else 2
MPIRUN = {"OMPI_MCA_plm_rsh_agent": "ssh:rsh:/bin/false", "OMPI_MCA_rmaps_base_oversubscribe": "true"}


@pytest.fixture
def variables(packages: Path) -> dict[str, str]:
    """The environment of `train`. Without our installed packages, it finds them in the checkout."""
    with socket.create_server(("127.0.0.1", 0)) as probe:  # others on this machine may have the default port
        port = str(probe.getsockname()[1])
    found = {
        **MPIRUN,
        "MASTER_PORT": port,
        "SHOAL_MEMBERS_ONLY": "1",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    if not Path(sysconfig.get_path("purelib"), "shoal-toolkit.pth").exists():
        found["PYTHONPATH"] = os.pathsep.join(map(str, (packages, TOOLKIT, REHEARSAL)))
    if not IS_REAL:
        return {**found, "SHOAL_REHEARSE": "1", "SHOAL_REHEARSE_GPUS": str(GPUS)}
    return found if GPUS > 1 else {**found, "NVIDIA_VISIBLE_DEVICES": "none"}
