"""A rank of a job whose communication is recorded, its clock SKEW_SECONDS ahead. `profiled.py DIRECTORY`."""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401 (registers the backend)
from smdistributed import dataparallel
from smdistributed.core import timeline

SKEW = round(1e9 * float(os.environ.get("SKEW_SECONDS") or 0))
timeline.wall = lambda: time.time_ns() + SKEW

dist.init_process_group(backend="smddp")
torch.manual_seed(0)
torch.set_num_threads(1)
model = DistributedDataParallel(torch.nn.Sequential(*[torch.nn.Linear(200, 200) for _ in range(6)]), bucket_cap_mb=0.2)
dataparallel.start_profiler(sys.argv[1])
for _ in range(20):
    model(torch.ones(64, 200)).square().mean().backward()
    model.zero_grad()
    time.sleep(0.1)  # long enough that the hosts' clocks can be compared
dataparallel.stop_profiler()
dist.barrier()
dist.destroy_process_group()
