"""Rehearsal: with SHOAL_REHEARSE=1 an unmodified script for GPUs runs on a machine without GPUs, before it costs money.

This package reads the environment and waits for the framework, which it does not import: what stands in for GPUs is in
the folder of the framework's name. Activated by the first import of `smdistributed`, which `shoal-rehearsal.pth`
does at the start of every Python process while the variable is set.
"""

from __future__ import annotations

import sys

from smdistributed.rehearsal.after_import import call_after_import
from smdistributed.rehearsal.horovod import Finder
from smdistributed.rehearsal.settings import RehearsalError, is_asked_for, read_settings

__all__ = ["RehearsalError", "activate"]


def activate() -> None:
    """Have PyTorch and TensorFlow rehearse from their import on; at once where one is imported already.

    What is wrong with the variables is raised by the import of the framework (RehearsalError), not here: Python goes on
    after an error at its start, and the script would run as if nothing had been asked for.
    """
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.append(Finder())
    for framework, rehearse in (("torch", _with_torch), ("tensorflow", _with_tensorflow)):
        if framework in sys.modules:
            rehearse()
        else:
            call_after_import(framework, rehearse)


def _with_torch() -> None:
    if is_asked_for():
        from smdistributed.rehearsal.torch import rehearse

        rehearse(read_settings())


def _with_tensorflow() -> None:
    if is_asked_for():
        from smdistributed.rehearsal.tensorflow import rehearse

        rehearse(read_settings())
