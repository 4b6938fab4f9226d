"""Which engine a group of torch.distributed has, and what torch brings to it: its store, gloo, NCCL."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from smdistributed.core import engine_selection
from smdistributed.core import reductions as compiled
from smdistributed.core.engines import Engine
from smdistributed.core.mpi import mpi_network
from smdistributed.core.shared_memory import without_engine
from smdistributed.core.torch import reductions
from smdistributed.core.torch.devices import refusal, without_nccl
from smdistributed.core.torch.gloo import gloo_network
from smdistributed.core.torch.rendezvous import beside


def open_engine(store: Store, rank: int, size: int, timeout: timedelta, gloo: object) -> tuple[Engine, str]:
    """Return the engine of a group, and its name with the reason; SMDDP_ENGINE may ask for one.

    store: of this group alone. gloo: torch's own group of the same ranks.

    Raises SMDDPError when SMDDP_ENGINE is no engine, or asks for shared memory or NCCL that there is none of.
    """
    wanted, later = engine_selection.requested_engine(), dist.is_initialized()
    problem = without_nccl(PrefixStore("nccl", store), rank, size) if wanted == "nccl" else ""
    if problem:
        raise refusal(problem)
    group = engine_selection.RankGroup(
        *(store, rank, size, timeout.total_seconds(), lambda: beside(store)),
        number=dist.get_rank() if later else rank,
        is_first=not later,
    )
    network = mpi_network(group) if wanted == "mpi" else gloo_network(group, store, gloo)
    return engine_selection.open_engine(group, network, wanted, reductions if without_engine() else compiled)
