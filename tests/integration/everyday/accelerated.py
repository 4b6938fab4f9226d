"""accelerate: training, gather, reduce and broadcast, on the backend that is named.

Without a name, in a rehearsal under `accelerate launch`: accelerate itself makes the group, on nccl.
"""

from __future__ import annotations

import sys

import plain
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object

import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401 (registers the backend)

for backend in sys.argv[1:]:
    torch.distributed.init_process_group(backend)
accelerator = Accelerator()
assert (accelerator.num_processes, accelerator.device) == (plain.SIZE, torch.device("cuda", plain.LOCAL_RANK))
device = accelerator.device
model = plain.new_model()
optimizer = torch.optim.SGD(model.parameters(), lr=plain.RATE)
model, optimizer = accelerator.prepare(model, optimizer)
for step in range(plain.STEPS):
    optimizer.zero_grad()
    accelerator.backward(plain.loss_of(model, *(rows.to(device) for rows in plain.share(step))))
    optimizer.step()
everybody = list(range(plain.SIZE))
found = accelerator.gather(torch.full((1, 4), float(plain.RANK), device=device))
assert found.tolist() == [[float(rank)] * 4 for rank in everybody]
padded = accelerator.pad_across_processes(torch.ones(plain.RANK + 1, device=device))
assert accelerator.gather_for_metrics(padded).sum() == sum(rank + 1 for rank in everybody)
assert (
    accelerator.reduce(torch.tensor([float(plain.RANK)], device=device), "mean").item() == sum(everybody) / plain.SIZE
)
assert gather_object([plain.RANK]) == everybody
assert broadcast_object_list([plain.RANK]) == [0]
accelerator.wait_for_everyone()
plain.check(f"accelerate on {sys.argv[1]}" if sys.argv[1:] else "accelerate launch", model.parameters())
torch.distributed.destroy_process_group()
