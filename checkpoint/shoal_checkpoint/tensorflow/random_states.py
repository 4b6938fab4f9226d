"""The states of the random number generators of Python, NumPy, TensorFlow and the layers of a model."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import tensorflow as tf

from shoal_checkpoint.position import check_numpy_state
from shoal_checkpoint.tensorflow.keras_release import keras_release, seed_states


class RandomStates:
    """The random states of this process, as values of JSON's types."""

    def __init__(self, model: Any) -> None:
        self._model = model
        layers = [each for each in model._flatten_layers() if hasattr(each, "_random_generator")]  # none in Keras 3
        self._layers = [each for each in layers if each._random_generator._rng_type == "stateful"]
        legacy = [each.name for each in layers if each._random_generator._rng_type == "legacy_stateful"]
        self.is_incomplete = ""
        if legacy:
            self.is_incomplete = (
                f"the layers {', '.join(legacy[:3])} draw random numbers with a state that TensorFlow cannot save. A "
                "resumed training is then not exact. Fix: call "
                "tf.keras.backend.experimental.enable_tf_random_generator() before you make the model"
            )
        """A warning that names layers, with a fix; empty if all states can be saved."""

    def _states(self) -> list[Any]:
        """Returns the variables with the states of TensorFlow and Keras."""
        first = tf.random.get_global_generator().state
        if keras_release() == 3:
            return [first, *seed_states(self._model)]
        own = [each._random_generator for each in self._layers]
        for each in own:
            each._maybe_init()
        return [first, *(each._generator.state for each in own)]

    def read(self) -> dict[str, Any]:
        version, words, gauss = random.getstate()
        name, keys, *rest = np.random.get_state()
        return {
            "python": [version, list(words), gauss],
            "numpy": [name, np.asarray(keys).tolist(), *rest],
            "tensorflow": [each.numpy().tolist() for each in self._states()],
        }

    def set(self, states: dict[str, Any]) -> None:
        version, words, gauss = states["python"]
        random.setstate((version, tuple(words), gauss))
        check_numpy_state(states["numpy"])
        np.random.set_state(tuple(states["numpy"]))
        for variable, state in zip(self._states(), states["tensorflow"]):
            variable.assign(tf.constant(state, dtype=variable.dtype))

    def derive(self, states: dict[str, Any], rank: int) -> dict[str, Any]:
        """Returns states for a rank that was not there, from another's: the same each time."""
        digest = hashlib.sha256(f"{states['python'][1]} {rank}".encode()).digest()
        before = self.read()
        random.seed(digest)
        np.random.seed(int.from_bytes(digest[:4], "big"))
        derived = self.read()
        self.set(before)
        key = int.from_bytes(digest[4:8], "big") >> 1  # it fits into the states of each release
        derived["tensorflow"] = [[*state[:-1], state[-1] ^ key] for state in states["tensorflow"]]
        return derived
