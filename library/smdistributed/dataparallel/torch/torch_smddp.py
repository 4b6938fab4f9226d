"""Importing this module registers the backend `smddp` with torch.distributed (AWS developer guide, 1.4 and later).

    import smdistributed.dataparallel.torch.torch_smddp
    torch.distributed.init_process_group(backend="smddp")

Where mpirun alone has started this process, it also sets RANK, WORLD_SIZE and the rest of what torch's `env://` reads.
"""

from __future__ import annotations

import inspect
import os

import torch.distributed

from smdistributed.core.launch import fill_in
from smdistributed.dataparallel.torch import consistency
from smdistributed.dataparallel.torch.process_group import ProcessGroup, create

BACKEND = "smddp"


def _register() -> None:
    if BACKEND in torch.distributed.Backend.backend_list:
        return
    register = torch.distributed.Backend.register_backend
    if "devices" in inspect.signature(register).parameters:  # torch 2.1 and later
        register(BACKEND, create, devices=["cpu", "cuda"])
    else:
        register(BACKEND, create)


_register()
consistency.install(lambda group: isinstance(group, ProcessGroup))
fill_in(os.environ)
