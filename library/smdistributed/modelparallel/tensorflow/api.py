"""`smp.init`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from smdistributed.modelparallel.tensorflow import layer_calls, optimizers
from smdistributed.modelparallel.tensorflow.model import DistributedModel, call_model
from smdistributed.modelparallel.tensorflow.state_mod import state


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
