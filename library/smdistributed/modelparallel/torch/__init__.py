"""Model parallel training in PyTorch: `import smdistributed.modelparallel.torch as smp` (AWS API 1.x).

    smp.init()
    model = smp.DistributedModel(model)
    optimizer = smp.DistributedOptimizer(optimizer)

    @smp.step
    def train_step(model, data, target):
        loss = loss_of(model(data), target)
        model.backward(loss)
        return loss

Other packages: `smp.amp`, `smp.nn`, `smp.optimizers`, `smp.utils`.
"""

from __future__ import annotations

import smdistributed.core.torch  # raises an error with a fix if torch is not installed
from smdistributed.modelparallel.backend.api import *  # noqa: F403 (ranks, groups, messages)
from smdistributed.modelparallel.torch import amp, exceptions, nn, optimizers, state_mod, utils
from smdistributed.modelparallel.torch.nn.replacement import (
    set_tensor_parallelism,
    tensor_parallelism,
    tp_register,
    tp_register_with_module,
)
from smdistributed.modelparallel.torch.nn.unsupported import prepare_optimizer
from smdistributed.modelparallel.torch.pipeline.activations import set_activation_checkpointing
from smdistributed.modelparallel.torch.plan.construction import delay_param_initialization
from smdistributed.modelparallel.torch.plan.manual_partition import partition, set_partition

# transformers' Trainer asks for smp.model.DistributedModel.
from smdistributed.modelparallel.torch.script import model
from smdistributed.modelparallel.torch.script.checkpoints import load, resume_from_checkpoint, save, save_checkpoint
from smdistributed.modelparallel.torch.script.init import (
    get_dp_process_group,
    get_mp_process_group,
    get_pp_process_group,
    get_rdp_process_group,
    get_tp_process_group,
    get_world_process_group,
    init,
    is_tracing,
    model_creation,
)
from smdistributed.modelparallel.torch.script.model import DistributedModel
from smdistributed.modelparallel.torch.script.optimizer import DistributedOptimizer
from smdistributed.modelparallel.torch.script.sharding import register_parameter
from smdistributed.modelparallel.torch.script.state import state
from smdistributed.modelparallel.torch.script.step import StepOutput, step
