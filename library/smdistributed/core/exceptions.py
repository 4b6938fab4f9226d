"""The errors SMDDPError and SMDDPNCCLError, and a maker of the error for a framework that is not installed.

SMDDPError stands for every failure of the communication engines and of data parallel training; model parallel training
raises it too. `smdistributed.dataparallel.exceptions` offers both. Launchers look for the classes' names in a failed
rank's output.
"""

from __future__ import annotations

import platform
import sys


class SMDDPError(RuntimeError):
    """Data parallel training cannot continue; the message says why."""


class SMDDPNCCLError(SMDDPError):
    """NCCL is requested and cannot carry this group's tensors, or does not start (AWS's name).

    Errors of a running NCCL are torch's own `torch.distributed.DistBackendError`.
    """


def missing_framework_error(error: ModuleNotFoundError, framework: str, module: str) -> ModuleNotFoundError:
    """Returns an error that names the fix; `error` itself if the framework is installed and lacks another module."""
    if error.name != module:
        return error
    return ModuleNotFoundError(
        f"No module named {module!r}: this script imports smdistributed for {framework}, which Python "
        f"{platform.python_version()} in {sys.prefix} does not have. Fix: pip install {module}",
        name=module,
    )
