"""Errors that users may catch, by the names that AWS documents."""

from __future__ import annotations


class SMPError(RuntimeError):
    """Base of what this package raises."""


class SMPConfigError(SMPError, ValueError):
    """A key of `mp_parameters` has a value that is not allowed; the message names both and says what is."""


class SMPUnsupportedError(SMPError, NotImplementedError):
    """A name of the published interface that is not implemented here yet."""


class SMPRuntimeError(SMPError):
    """A step cannot go on: a rank failed, or the script calls something where it cannot be called."""


class StepUsageError(SMPRuntimeError):
    """Something that belongs inside a function under `smp.step` was called outside, or the other way round."""


class MicrobatchError(SMPRuntimeError, ValueError):
    """A batch cannot be split into the configured number of microbatches."""
