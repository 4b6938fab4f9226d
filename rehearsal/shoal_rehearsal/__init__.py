"""Rehearsal: with SHOAL_REHEARSE=1 an unmodified script for GPUs runs on a machine without GPUs, before it costs money.

This package reads the environment and waits for the framework, which it does not import: what stands in for GPUs is in
the folder of the framework's name. `shoal-rehearsal.pth` calls `activate` when a Python process starts, if the variable
is set.
"""

from __future__ import annotations

import sys

from shoal_rehearsal.after_import import call_after_import
from shoal_rehearsal.replacements import ReplacementFinder
from shoal_rehearsal.settings import RehearsalError, is_asked_for, read_settings

__all__ = ["RehearsalError", "activate"]


def activate() -> None:
    """Emulate GPUs in PyTorch and TensorFlow from their import on, or at once if they have been imported.

    Calling it again does nothing.

    What is wrong with the variables is raised by the import of the framework (RehearsalError), not here: Python goes on
    after an error at its start, and the script would run as if nothing had been asked for.
    """
    if any(isinstance(finder, ReplacementFinder) for finder in sys.meta_path):
        return
    sys.meta_path.append(ReplacementFinder())
    for framework, rehearse in (("torch", _with_torch), ("tensorflow", _with_tensorflow)):
        if framework in sys.modules:
            rehearse()
        else:
            call_after_import(framework, rehearse)


def _with_torch() -> None:
    if is_asked_for():
        from shoal_rehearsal.torch import rehearse

        rehearse(read_settings())


def _with_tensorflow() -> None:
    if is_asked_for():
        from shoal_rehearsal.tensorflow import rehearse

        rehearse(read_settings())
