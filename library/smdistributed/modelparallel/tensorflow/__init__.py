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
"""

from __future__ import annotations

import smdistributed.core.tensorflow  # noqa: F401 (says what to do where it is not installed)
from smdistributed.modelparallel.backend import api as core
from smdistributed.modelparallel.backend.api import (
    DP_GROUP,
    MP_GROUP,
    PP_GROUP,
    RDP_GROUP,
    TP_GROUP,
    WORLD,
    CommGroup,
    RankType,
    allgather,
    barrier,
    broadcast,
    dp_barrier,
    dp_rank,
    dp_size,
    get_dp_group,
    get_mp_group,
    get_pp_group,
    get_rdp_group,
    get_tp_group,
    is_initialized,
    local_rank,
    local_size,
    mp_barrier,
    mp_rank,
    mp_size,
    pp_barrier,
    pp_rank,
    pp_size,
    rank,
    rdp_barrier,
    rdp_rank,
    rdp_size,
    recv_from,
    send,
    size,
    tp_barrier,
    tp_rank,
    tp_size,
)
from smdistributed.modelparallel.tensorflow import utils
from smdistributed.modelparallel.tensorflow.api import init
from smdistributed.modelparallel.tensorflow.checkpoints import CheckpointManager
from smdistributed.modelparallel.tensorflow.layer_calls import partition
from smdistributed.modelparallel.tensorflow.model import DistributedModel, register_post_partition_hook
from smdistributed.modelparallel.tensorflow.splitting import StepOutput
from smdistributed.modelparallel.tensorflow.state_mod import state
from smdistributed.modelparallel.tensorflow.step import step

__all__ = ["CheckpointManager", "CommGroup", "DP_GROUP", "DistributedModel", "MP_GROUP", "PP_GROUP", "RDP_GROUP"]
__all__ += ["RankType", "StepOutput", "TP_GROUP", "WORLD", "allgather", "barrier", "broadcast", "core", "dp_barrier"]
__all__ += ["dp_rank", "dp_size", "get_dp_group", "get_mp_group", "get_pp_group", "get_rdp_group", "get_tp_group"]
__all__ += ["init", "is_initialized", "local_rank", "local_size", "mp_barrier", "mp_rank", "mp_size", "partition"]
__all__ += ["pp_barrier", "pp_rank", "pp_size", "rank", "rdp_barrier", "rdp_rank", "rdp_size", "recv_from"]
__all__ += ["register_post_partition_hook", "send", "size", "state", "step", "tp_barrier", "tp_rank", "tp_size"]
__all__ += ["utils"]
