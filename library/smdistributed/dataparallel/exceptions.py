"""The library's exceptions. Launchers look for the names of these classes in a failed rank's output."""

from __future__ import annotations

from smdistributed.core.exceptions import SMDDPError

__all__ = ["SMDDPError", "SMDDPNCCLError"]


class SMDDPNCCLError(SMDDPError):
    """NCCL failed (AWS names it so). Here torch raises its own `torch.distributed.DistBackendError` instead."""
