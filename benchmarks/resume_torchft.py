"""The script of resume_train.py for torchft: a replica group with one rank, which its own torchrun starts.

The first group, which survives, serves the lighthouse. A group that was killed gets the state from the other one, and
no checkpoint is written. A step that failed because of the other group is not marked.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import resume_train
import torch
from resume_train import STEP_SECONDS, mark
from torch import nn
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
from torchft.coordination import LighthouseServer

PORT = int(os.environ["RESUME_LIGHTHOUSE_PORT"])
os.environ["RANK"] = GROUP = os.environ["RESUME_GROUP"]  # each group has only a rank 0
# A lost group is noticed after 1 s instead of 5 s. A step waits 1 s instead of 60 s for late groups.
LIGHTHOUSE = {"min_replicas": 1, "join_timeout_ms": 1000, "heartbeat_timeout_ms": 1000, "quorum_tick_ms": 10}


def main() -> None:
    """Train until the number of steps, with the groups that are there."""
    mark("began", resume_train.BEGAN)
    mark("imported", time.time())
    if GROUP == "0":
        lighthouse = LighthouseServer(bind=f"127.0.0.1:{PORT}", **LIGHTHOUSE)  # noqa: F841  until the process ends
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=10)),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=1,
        rank=0,
        world_size=1,
        hostname="127.0.0.1",
        lighthouse_addr=f"http://127.0.0.1:{PORT}",
        replica_id=f"group-{GROUP}",
    )
    parallel, managed = DistributedDataParallel(manager, model), Optimizer(manager, optimizer)
    mark("loaded", time.time(), manager.current_step())
    while (step := manager.current_step()) < int(os.environ["RESUME_STEPS"]):
        managed.zero_grad()
        nn.functional.cross_entropy(parallel(torch.randn(32, 64)), torch.randint(0, 10, (32,))).backward()  # type: ignore[no-untyped-call]
        managed.step()
        time.sleep(STEP_SECONDS)
        if manager.current_step() > step:
            os.environ["WORLD_SIZE"] = str(manager.num_participants())
            mark("step", time.time(), manager.current_step())


if __name__ == "__main__":
    main()
