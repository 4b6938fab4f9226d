"""Runs CUDA scripts on a CPU: with SHOAL_REHEARSE=1, PyTorch and TensorFlow see emulated GPUs.

`shoal-rehearsal.pth` calls `activate` when a Python process starts, if the variable is set. Importing this package
imports no framework; the emulation of GPUs is in the packages `torch` and `tensorflow`.
"""

from __future__ import annotations

import sys

from shoal_rehearsal.import_hooks import ReplacementFinder, call_after_import
from shoal_rehearsal.settings import RehearsalError, is_enabled, read_settings

__all__ = ["RehearsalError", "activate"]


def activate() -> None:
    """Emulates GPUs in PyTorch and TensorFlow from their import on, or at once if they have been imported.

    It extends sys.meta_path in any case. A framework is patched only if SHOAL_REHEARSE is true when it is imported. A
    second call does nothing.

    Invalid variables raise RehearsalError when the framework is imported, and here only if it has been imported before:
    Python ignores errors at startup, and the script would run without emulated GPUs.
    """
    if any(isinstance(finder, ReplacementFinder) for finder in sys.meta_path):
        return
    sys.meta_path.append(ReplacementFinder())
    for framework, emulate_gpus in (("torch", _with_torch), ("tensorflow", _with_tensorflow)):
        if framework in sys.modules:
            emulate_gpus()
        else:
            call_after_import(framework, emulate_gpus)


def _with_torch() -> None:
    if is_enabled():
        from shoal_rehearsal.torch import emulate_gpus

        emulate_gpus(read_settings())


def _with_tensorflow() -> None:
    if is_enabled():
        from shoal_rehearsal.tensorflow import emulate_gpus

        emulate_gpus(read_settings())
