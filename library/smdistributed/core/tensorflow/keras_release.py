"""Which Keras `tf.keras` is: its release, and the backend that it computes with."""

from __future__ import annotations

import os

import tensorflow as tf

from smdistributed.core.exceptions import SMDDPError


def is_keras_3() -> bool:
    """Whether `tf.keras` is Keras 3, as in TensorFlow 2.16 and later. TF_USE_LEGACY_KERAS=1 keeps Keras 2 there."""
    return getattr(tf.keras, "__version__", "2").startswith("3.")  # TensorFlow 2.14's has no version


def require_tensorflow_backend() -> None:
    """Raises SMDDPError if Keras 3 has another backend: its variables are then not in TensorFlow."""
    wanted = os.environ.get("KERAS_BACKEND", "tensorflow")
    try:
        backend = tf.keras.backend.backend()
    except ImportError:  # the backend is not installed, or Keras is not
        if wanted == "tensorflow":
            raise
        backend = wanted
    if backend != "tensorflow":
        raise SMDDPError(
            f"Keras uses the backend {backend!r}. smdistributed for TensorFlow cannot send its tensors. Allowed: "
            "'tensorflow'. Fix: set KERAS_BACKEND=tensorflow before the first import of Keras."
        )
