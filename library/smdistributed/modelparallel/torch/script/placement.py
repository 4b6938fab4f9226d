"""Which stage has which module of the script's model, and what happens to the modules when that is decided.

Parameters that were constructed without memory are made, and this stage's tensors move to its GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from smdistributed.core.options import warn_without_effect
from smdistributed.modelparallel.torch.pipeline.module_manager import ModuleManager
from smdistributed.modelparallel.torch.plan.auto_partition import auto_partition
from smdistributed.modelparallel.torch.plan.construction import materialize_module
from smdistributed.modelparallel.torch.plan.manual_partition import has_partition, manual_stages
from smdistributed.modelparallel.torch.script.state import TorchState


def choose_stages(
    state: TorchState,
    manager: ModuleManager,
    resumed: Mapping[str, int] | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> dict[str, int]:
    """Decides which stage has which module. With `auto_partition` it may trace the model and print the partition.

    It then warns if the script has used `smp.partition` or `smp.set_partition`, and takes the stages of a checkpoint,
    `resumed`. Raises SMPConfigError if the model has fewer modules than stages, or is given a stage that does not
    exist.
    """
    cfg = state.cfg
    if not cfg.auto_partition:
        return manual_stages(manager, cfg.default_partition, cfg.partitions)
    if any(has_partition(module) for module in manager.modules.values()):
        warn_without_effect("smp.partition and smp.set_partition", "'auto_partition' of mp_parameters is true")
    if cfg.partitions == 1:
        return dict.fromkeys(manager.modules, 0)
    if resumed is not None:
        return dict(resumed)
    state.is_tracing = True
    try:
        found = auto_partition(manager.root, cfg, args, kwargs)
    finally:
        state.is_tracing = False
    if state.rank == 0:
        print(found, file=sys.stderr)
    return found.stages


def materialize_local_modules(
    manager: ModuleManager, only: Collection[nn.Module] | None = None
) -> dict[nn.Parameter, nn.Parameter]:
    """Returns the new parameters, by the parameters without memory that they replace. `only`: of these modules."""
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    for name, module in manager.local_modules():
        if only is not None and module not in only:
            continue
        for key, parameter in module._parameters.items():
            if parameter in replaced:  # shared
                module._parameters[key] = replaced[parameter]
        replaced.update(materialize_module(module, name))
    return replaced


def move_to_gpu(modules: Iterable[nn.Module]) -> None:
    """Moves own parameters and buffers of modules to the current GPU, if there is one. Parameter objects stay."""
    if not torch.cuda.is_available():
        return
    for module in modules:
        for parameter in module._parameters.values():
            if parameter is not None:
                parameter.data = parameter.data.cuda()
        for key, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[key] = buffer.cuda()
