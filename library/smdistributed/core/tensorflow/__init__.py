"""Collectives and messages as TensorFlow operations, in eager code and in graphs."""

from smdistributed.core.exceptions import missing_framework_error

try:
    import tensorflow  # noqa: F401
except ModuleNotFoundError as error:
    raise missing_framework_error(error, "TensorFlow", "tensorflow") from None
