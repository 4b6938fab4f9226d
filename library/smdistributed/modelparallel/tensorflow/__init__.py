"""Model parallel training in TensorFlow: `import smdistributed.modelparallel.tensorflow as smp` (AWS API 1.x).

    smp.init()

    class Model(smp.DistributedModel):
        def call(self, inputs, training=None): ...

    @smp.step
    def get_grads(images, labels):
        predictions = model(images, training=True)
        loss = loss_of(labels, predictions)
        return optimizer.get_gradients(loss, model.trainable_variables), loss

    @tf.function
    def train_step(images, labels):
        gradients, loss = get_grads(images, labels)
        optimizer.apply_gradients(zip([g.accumulate() for g in gradients], model.trainable_variables))
        return loss.reduce_mean()

`smp.utils` is another package.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import smdistributed.core.tensorflow  # says what to do if it is not installed
import smdistributed.modelparallel.tensorflow.release  # noqa: F401 (refuses Keras 3)
from smdistributed.modelparallel.backend import api as core
from smdistributed.modelparallel.backend.api import *  # noqa: F403 (ranks, groups, messages)
from smdistributed.modelparallel.tensorflow import layer_calls, optimizers, utils
from smdistributed.modelparallel.tensorflow.checkpoints import CheckpointManager
from smdistributed.modelparallel.tensorflow.layer_calls import partition
from smdistributed.modelparallel.tensorflow.model import DistributedModel, call_model, register_post_partition_hook
from smdistributed.modelparallel.tensorflow.state_mod import state
from smdistributed.modelparallel.tensorflow.step import StepOutput, step

__all__ = ["CheckpointManager", "DistributedModel", "StepOutput", "core", "init", "partition"]
__all__ += ["register_post_partition_hook", "state", "step", "utils"]
__all__ += core.__all__


def init(config: Mapping[str, Any] | None = None) -> None:
    """Reads the configuration, connects to the other ranks, and gives TensorFlow only this rank's GPU (AWS API).

    Every rank calls it first. It patches Keras: calls of layers, optimizers, gradient tapes. With SMP_TIMELINE it
    starts a recording. Calling it again does nothing.

    Args:
        config: `mp_parameters`. The launch's values (SM_HP_MP_PARAMETERS) take precedence. With `horovod` or `ddp`,
            ranks beyond `partitions` are replicas: optimizers apply the mean of their gradients.

    Raises:
        SMPConfigError: If a key or value is not allowed.
        SMPUnsupportedError: If a key is not supported for TensorFlow.
        LaunchError: If the environment does not say which rank this is, or gives no address to meet at.
        SMDDPError: If TensorFlow already uses other GPUs.
        StoreError: If rank 0 is not reached.
        TimelineError: If the file of SMP_TIMELINE cannot be written.
    """
    if state.initialized:
        return
    state.init(config)
    layer_calls.intercept_calls(call_model, DistributedModel)
    optimizers.patch_optimizers()
