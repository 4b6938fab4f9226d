"""mpi4py beside torch: a script that talks over both."""

from __future__ import annotations

import plain
import torch
from mpi4py import MPI
from torch.nn.parallel import DistributedDataParallel

import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401 (registers the backend)

torch.distributed.init_process_group("smddp")
assert (MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size) == (plain.RANK, plain.SIZE)
model = DistributedDataParallel(plain.new_model())
optimizer = torch.optim.SGD(model.parameters(), lr=plain.RATE)
for step in range(plain.STEPS):
    optimizer.zero_grad()
    plain.loss_of(model, *plain.share(step)).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    assert MPI.COMM_WORLD.allreduce(step) == plain.SIZE * step
plain.check("mpi4py", model.parameters())
torch.distributed.destroy_process_group()
