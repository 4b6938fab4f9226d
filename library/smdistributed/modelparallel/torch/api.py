"""The names of `smp` that are about ranks and messages."""
from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

from smdistributed.modelparallel.torch.model import DistributedModel
from smdistributed.modelparallel.torch.module_manager import partition, set_partition
from smdistributed.modelparallel.torch.splitting import StepOutput
from smdistributed.modelparallel.torch.state_mod import state
from smdistributed.modelparallel.torch.step import step


def init(config: Mapping[str, Any] | None = None) -> None:
    state.init(config)

def rank() -> int:
    state.require()
    return state.rank
def pp_rank() -> int:
    state.require()
    return state.stage.index
def dp_rank() -> int:
    return state.group("DP_GROUP").index(state.rank)
