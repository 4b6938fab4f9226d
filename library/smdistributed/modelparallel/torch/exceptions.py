"""Errors of the PyTorch front, by the names that scripts import."""

from smdistributed.modelparallel.backend.exceptions import (
    MicrobatchError,
    SMPConfigError,
    SMPError,
    SMPRuntimeError,
    SMPUnsupportedError,
    StepUsageError,
)

__all__ = ["MicrobatchError", "SMPConfigError", "SMPError", "SMPRuntimeError", "SMPUnsupportedError", "StepUsageError"]
