"""Behaviour with Keras 3 only, in the image of TensorFlow 2.21: other backends, XLA, no model parallel training."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.launching import Alone

REFUSED = """
import importlib, sys
try:
    importlib.import_module(sys.argv[1])
except Exception as error:
    print(f"{type(error).__name__}: {error}")
"""
CHOICE_OF_XLA = """
import tensorflow as tf
import smdistributed.dataparallel.tensorflow as sdp
gpu = tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")
tf.config.list_physical_devices = lambda kind=None: [gpu]
for wrap in (lambda optimizer: optimizer), sdp.DistributedOptimizer:
    for policy in "float32", "mixed_float16":
        model = tf.keras.Sequential([tf.keras.Input((2,)), tf.keras.layers.Dense(1, dtype=policy)])
        model.dtype_policy = tf.keras.mixed_precision.Policy(policy)
        model.compile(wrap(tf.keras.optimizers.SGD()), "mse")
        print(type(model.optimizer).__name__, model.jit_compile)
"""


def test_model_parallel_training_is_refused(alone: Alone) -> None:
    error = alone("-c", REFUSED, "smdistributed.modelparallel.tensorflow")
    assert error.startswith(
        "SMPUnsupportedError: smdistributed.modelparallel.tensorflow needs Keras 2, and TensorFlow "
    )
    assert "Fix: run the script with TensorFlow 2.14" in error


def test_another_backend_is_refused(alone: Alone) -> None:
    error = alone("-c", REFUSED, "smdistributed.dataparallel.tensorflow.keras", COLD="1", KERAS_BACKEND="jax")
    assert "SMDDPError: Keras uses the backend 'jax'" in error
    assert "Fix: set KERAS_BACKEND=tensorflow" in error


def test_models_use_no_xla_on_gpus_if_the_optimizer_is_distributed(alone: Alone) -> None:
    printed = alone("-c", CHOICE_OF_XLA).splitlines()
    assert printed == ["SGD True", "LossScaleOptimizer True", "SGD False", "LossScaleOptimizer False"]
