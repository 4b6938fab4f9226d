"""Collectives and messages as TensorFlow operations, in eager code and in graphs.

Importing raises SMDDPError if Keras computes with another backend than TensorFlow.
"""

from smdistributed.core.exceptions import missing_framework_error

try:
    import tensorflow  # noqa: F401
except ModuleNotFoundError as error:
    raise missing_framework_error(error, "TensorFlow", "tensorflow") from None

from smdistributed.core.tensorflow.keras_release import require_tensorflow_backend

require_tensorflow_backend()
