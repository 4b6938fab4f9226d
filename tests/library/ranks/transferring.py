"""One rank: runs another script of this folder. Its stages exchange tensors as GPUs do, by gloo instead of NCCL.

`transferring.py [--device] SCRIPT ARGUMENT ...`; --device: tensors on CUDA devices, in a rehearsal, not on the CPU.
"""

from __future__ import annotations

import atexit
import os
import runpy
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from smdistributed.modelparallel.torch.pipeline import carrier
from smdistributed.modelparallel.torch.script import state as state_module

_given: list[int] = []


class Counting(carrier.Carrier):
    """Takes tensors of any length, and counts those that it receives."""

    def __init__(self, group: Any, device: torch.device) -> None:
        super().__init__(group, device, 1)

    def receive(self, tensors: Any, *arguments: Any) -> None:
        super().receive(tensors, *arguments)
        _given.append(len(tensors))


def open_group(store: Store, rank: int, size: int, seconds: float) -> Any:
    gloo: Any = dist.ProcessGroupGloo
    return gloo(PrefixStore("gloo", store), rank, size, timedelta(seconds=seconds))


def open_on_cpu(store: Store, rank: int, size: int, replicas: int, seconds: float) -> Counting | None:
    if replicas > 1 or size == 1:
        return None
    return Counting(open_group(store, rank, size, seconds), torch.device("cpu"))


def main(words: list[str]) -> None:
    patched: Any = carrier
    if words[0] == "--device":
        words = words[1:]
        os.environ[carrier.VARIABLE] = "nccl"
        patched.open_group, patched.nccl_problem = open_group, lambda *_: ""
        patched.Carrier = Counting
    else:
        state_module.open_carrier = open_on_cpu  # type: ignore[attr-defined]
    atexit.register(lambda: print(f"transferred {sum(_given)} tensors\n", end=""))
    sys.argv = words
    runpy.run_path(str(Path(__file__).parent / words[0]), run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
