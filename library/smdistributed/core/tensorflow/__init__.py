"""Collectives and messages as TensorFlow operations, in eager code and in graphs."""

from smdistributed.core.lacking import lacking

try:
    import tensorflow  # noqa: F401
except ModuleNotFoundError as error:
    raise lacking(error, "TensorFlow", "tensorflow") from None
