"""The release and backend of Keras, and the variables of Keras 3."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from shoal_checkpoint.directories import CheckpointError


def keras_release() -> int:
    """Returns 3 if `tf.keras` is Keras 3, as in TensorFlow 2.16 and later, and else 2."""
    return 3 if getattr(tf.keras, "__version__", "2").startswith("3.") else 2


def require_tensorflow_backend() -> None:
    """Raises CheckpointError if Keras computes with another backend: its variables are then not in TensorFlow."""
    if (backend := tf.keras.backend.backend()) != "tensorflow":
        raise CheckpointError(
            f"Keras uses the backend {backend!r}. shoal_checkpoint.tensorflow cannot save its variables. Allowed: "
            "'tensorflow'. Fix: set KERAS_BACKEND=tensorflow before the first import of Keras. If the backend is "
            "'torch', you can save with shoal_checkpoint.torch in a loop of your own."
        )


def tensorflow_variable(variable: Any) -> Any:
    """Returns the tf.Variable in a variable of Keras 3; others are returned unchanged."""
    return variable if isinstance(variable, tf.Variable) else variable.value


def seed_states(model: Any) -> list[Any]:
    """Returns the states of the seed generators of Keras 3: of the global one and of a model's layers."""
    from keras.src.random.seed_generator import global_seed_generator

    weights = {id(each) for each in model.weights}
    return [global_seed_generator().state, *(each for each in model.variables if id(each) not in weights)]
