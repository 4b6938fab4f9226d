"""How long the ranks of a job wait for each other."""

from __future__ import annotations

from smdistributed.core.diagnostics import read_seconds

VARIABLE = "SMP_TIMEOUT_SECONDS"
LONGER = f"Fix: see what it does; if it may take longer, set {VARIABLE} to more seconds on all ranks."
"""The end of what is said when the limit has passed."""
_SECONDS = 1800.0  # as in torch.distributed


def timeout_seconds() -> float:
    """The limit of each wait: SMP_TIMEOUT_SECONDS, else 1800. Raises CollectiveError if it is no number above 0."""
    return read_seconds(VARIABLE, _SECONDS)
