"""A rank of a script for GPUs, as TensorFlow's guide writes them. Ends with `equal` and the engine."""

from __future__ import annotations

import warnings

import horovod.tensorflow as hvd
import horovod.tensorflow.keras as hvk
import tensorflow as tf
from horovod.tensorflow.keras.callbacks import MetricAverageCallback
from tests.library_tensorflow.ranks.printing import print_line

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
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    tf.distribute.MirroredStrategy()  # of this rank's one GPU
    tf.config.set_visible_devices(gpus, "GPU")
    assert tf.distribute.MirroredStrategy().num_replicas_in_sync == 1
replicas = [str(one.message) for one in warned if "MirroredStrategy" in str(one.message)]
assert len(replicas) == 1 and "has 1 replica here, and 2 on 2 GPUs" in replicas[0], replicas

hvd.init()  # Horovod is not installed
hvk.init()
assert (hvd.rank(), hvd.size(), hvk.local_rank()) == (sdp.rank(), 2, sdp.local_rank())
assert float(hvd.allreduce(tf.constant(1.0 + hvd.rank()), average=True)) == 1.5
assert float(hvk.allreduce(1.0 + hvd.rank(), name="loss", op=hvd.Sum)) == 3.0
model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(1,))])
optimizer = hvk.DistributedOptimizer(
    tf.keras.optimizers.SGD(0.1), backward_passes_per_step=1, average_aggregated_gradients=True
)  # as Horovod's own example for Keras
model.compile(optimizer, "mse")
start = [hvk.callbacks.BroadcastGlobalVariablesCallback(0), MetricAverageCallback()]
model.fit(tf.ones([4, 1]) * hvd.rank(), tf.ones([4, 1]), callbacks=start, verbose=0)
for value in model.get_weights():
    assert float(tf.reduce_max(hvd.allgather(value))) == float(tf.reduce_min(hvd.allgather(value)))
try:
    absent = hvd.ProcessSet
except AttributeError as error:
    assert "has no 'ProcessSet'" in str(error) and "install horovod" in str(error)
else:
    raise AssertionError(absent)
print_line("equal")
