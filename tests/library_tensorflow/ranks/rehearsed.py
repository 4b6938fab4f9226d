"""A rank of a script for GPUs, as TensorFlow's guide writes them. Ends with `equal` and the engine."""

from __future__ import annotations

import tensorflow as tf
from tests.library_tensorflow.ranks.told import tell

import smdistributed.dataparallel.tensorflow as sdp

sdp.init()
gpus = tf.config.experimental.list_physical_devices("GPU")
assert len(gpus) == 2 and gpus == tf.config.list_physical_devices("GPU"), gpus
assert tf.config.get_visible_devices("GPU") == [gpus[sdp.local_rank()]]  # what init has chosen
for gpu in gpus:
    tf.config.experimental.set_memory_growth(gpu, True)
tf.config.experimental.set_visible_devices(gpus[sdp.local_rank()], "GPU")
assert tf.config.experimental.get_memory_growth(gpus[0])
assert [device.name for device in tf.config.list_logical_devices("GPU")] == ["/device:GPU:0"]
assert len(tf.config.list_physical_devices("CPU")) == 1
assert tf.config.experimental.get_memory_info("GPU:0") == {"current": 0, "peak": 0}
assert tf.test.is_gpu_available() and tf.test.gpu_device_name() == "/device:GPU:0"
try:
    tf.config.set_visible_devices(tf.config.list_physical_devices("CPU"), "GPU")
except ValueError as error:
    assert "CPU:0" in str(error)
else:
    raise AssertionError("a CPU is no GPU")


def twice(tensor: tf.Tensor) -> tf.Tensor:
    with tf.device("/GPU:0"):
        return sdp.oob_allreduce(tensor * 2.0)


with tf.device("/GPU:0"):
    variable = tf.Variable([1.0 + sdp.rank()])
    assert float(tf.function(twice)(variable)[0]) == 3.0
    assert variable.device.endswith("CPU:0")
tell("equal")
