"""The errors of the engine and of data parallel training, which `smdistributed.dataparallel.exceptions` offers as well.

Launchers look for the classes' names in a failed rank's output. Model parallel training on this engine raises them too.
"""

from __future__ import annotations


class SMDDPError(RuntimeError):
    """Data parallel training cannot go on; the message says why."""


class SMDDPNCCLError(SMDDPError):
    """NCCL is asked for and cannot carry this group's tensors, or does not start (AWS names it so).

    What fails later, when NCCL runs, torch raises as its own `torch.distributed.DistBackendError`.
    """
