"""How long the ranks of a job wait for each other, and how errors describe a rank that does not answer."""

from __future__ import annotations

from smdistributed.core.diagnostics import read_seconds

TIMEOUT_VARIABLE = "SMP_TIMEOUT_SECONDS"
TIMEOUT_FIX = f"Fix: find out why it is slow; if it may take longer, set {TIMEOUT_VARIABLE} higher on all ranks."
"""The last sentence of every message about an exceeded limit."""
CONNECTION_LOST = (
    "connection lost (the process exited or its host is unreachable). Fix: look for the error that it reported itself."
)
_DEFAULT_SECONDS = 1800.0  # as in torch.distributed


def timeout_seconds() -> float:
    """Reads the limit of each wait from SMP_TIMEOUT_SECONDS.

    Returns:
        Seconds; 1800 if the variable is not set.

    Raises:
        CollectiveError: If the value is not a number above 0.
    """
    return read_seconds(TIMEOUT_VARIABLE, _DEFAULT_SECONDS)
