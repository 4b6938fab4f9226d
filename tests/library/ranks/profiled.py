"""A rank of a job that is recorded, its clock SKEW_SECONDS ahead. `profiled.py [DIRECTORY]`.

Without the directory, SMDDP_TIMELINE records the job. With it, the rank also writes the seconds of each step there.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path

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
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
if sys.argv[1:]:
    dataparallel.start_profiler(sys.argv[1])
seconds, began = [], time.perf_counter()
for step in range(20):
    for backward in range(1 + step % 2):  # every other step accumulates gradients
        with model.no_sync() if backward < step % 2 else contextlib.nullcontext():
            model(torch.ones(64, 200)).square().mean().backward()
    optimizer.step()
    seconds.append(time.perf_counter() - began)
    began += seconds[-1]
    model.zero_grad()
    time.sleep(0.1)  # long enough that the hosts' clocks can be compared
if sys.argv[1:]:
    dataparallel.stop_profiler()
    Path(sys.argv[1], f"seconds_{dist.get_rank()}.json").write_text(json.dumps(seconds))
dist.barrier()
dist.destroy_process_group()
