"""Errors that users may catch, by the names that AWS documents."""

from __future__ import annotations


class SMPError(RuntimeError):
    """The base of all errors of this package."""


class SMPConfigError(SMPError, ValueError):
    """`mp_parameters` has an unknown key, or a value that is not allowed. The message says what is allowed."""


class SMPUnsupportedError(SMPError, NotImplementedError):
    """A name of the published interface that is not implemented here yet."""


class SMPRuntimeError(SMPError):
    """A step cannot continue: a rank failed, or the script called a function outside of its place."""


class StepUsageError(SMPRuntimeError):
    """A function was called outside of `smp.step` that belongs inside, or the other way round."""


class MicrobatchError(SMPRuntimeError, ValueError):
    """A batch cannot be split into the configured number of microbatches."""
