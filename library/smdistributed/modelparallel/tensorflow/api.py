"""The beginning of a job."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from smdistributed.modelparallel.tensorflow import layers, optimizers
from smdistributed.modelparallel.tensorflow.model import DistributedModel, answer
from smdistributed.modelparallel.tensorflow.state_mod import state


def init(config: Mapping[str, Any] | None = None) -> None:
    """Read the configuration and meet the other ranks; every rank calls it, before anything else (AWS API).

    config: `mp_parameters`; those of the launch (SM_HP_MP_PARAMETERS) win over it. With `horovod`, or `ddp`, ranks
    beyond `partitions` are replicas: optimizers apply the mean of their gradients.

    Raises SMPConfigError, which names the key and what is allowed, SMPUnsupportedError for a key that TensorFlow has
    not, and LaunchError when the environment does not say which rank this is.
    """
    if state.initialized:
        return
    state.init(config)
    layers.watch(answer, DistributedModel)
    optimizers.install()
