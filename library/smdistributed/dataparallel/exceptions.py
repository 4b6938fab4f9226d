"""The library's exceptions. Launchers look for the names of these classes in a failed rank's output."""

from __future__ import annotations

from smdistributed.core.exceptions import SMDDPError, SMDDPNCCLError

__all__ = ["SMDDPError", "SMDDPNCCLError"]
