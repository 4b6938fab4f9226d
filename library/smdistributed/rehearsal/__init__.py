"""Rehearsal: with SHOAL_REHEARSE=1 an unmodified CUDA script runs on a machine without GPUs, before it costs money.

This package reads the environment and waits for the framework, which it does not import: what stands in for GPUs is in
the folder of the framework's name. Activated by the first import of `smdistributed`, which `shoal-rehearsal.pth`
does at the start of every Python process while the variable is set.
"""

from __future__ import annotations

import sys

from smdistributed.rehearsal.after_import import call_after_import
from smdistributed.rehearsal.settings import RehearsalError, is_asked_for, read_settings

__all__ = ["RehearsalError", "activate"]


def activate() -> None:
    """Have PyTorch rehearse from its import on; at once where it is imported already.

    What is wrong with the variables is raised by the import of PyTorch (RehearsalError), not here: Python goes on after
    an error at its start, and the script would run as if nothing had been asked for.
    """
    if "torch" in sys.modules:
        _rehearse()
    else:
        call_after_import("torch", _rehearse)


def _rehearse() -> None:
    if is_asked_for():
        settings = read_settings()
        from smdistributed.rehearsal.torch import rehearse

        rehearse(settings)
