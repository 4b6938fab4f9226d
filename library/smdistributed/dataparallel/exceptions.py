"""The library's exceptions. Launchers look for the names of these classes in a failed rank's output."""

from __future__ import annotations


class SMDDPError(RuntimeError):
    """Data parallel training cannot go on; the message says why."""


class SMDDPNCCLError(SMDDPError):
    """NCCL failed (AWS names it so). Here torch raises its own `torch.distributed.DistBackendError` instead."""
