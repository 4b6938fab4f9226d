"""The functions with which `serve` answers for the model of examples/keras: a SavedModel in the directory 1.

`Model.export` has written it, for serving only: `tf.keras.models.load_model` cannot read it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf


def model_fn(model_dir: str) -> Any:
    """Load the model."""
    return tf.saved_model.load(f"{model_dir}/1")


def predict_fn(data: np.ndarray[Any, Any], model: Any) -> Any:
    """Measurements of wines (n, 13) to the probabilities of three classes (n, 3)."""
    return model.serve(tf.constant(data, tf.float32)).numpy()
