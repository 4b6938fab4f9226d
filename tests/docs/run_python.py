"""Runs Python blocks of pages, each page in a process of its own: `run_python.py < {"page": [[line, "source"], …]}`.

The blocks of a page share their names. They begin with these: torch, optimizers, a model and a loader of four batches.
The process is a job of one rank, so that the libraries need no launcher. Ends with 1 if a block fails.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import HashStore
from torch.utils.data import DataLoader, TensorDataset


def make_names() -> dict[str, Any]:
    """Returns the names that a page's blocks begin with."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = TensorDataset(torch.rand(64, 4), torch.randint(2, (64,)))
    loader = DataLoader(data, batch_size=16)
    return {
        "__name__": "__main__",
        "torch": torch,
        "DataLoader": DataLoader,
        "os": os,
        "sys": sys,
        "Path": Path,
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1),
        "data": data,
        "loader": loader,
        "batches": loader,
        "loss_of": torch.nn.functional.cross_entropy,
        "step": lambda batch: model(batch[0]).sum(),
        "epoch": 0,
    }


def run_page(page: str, blocks: list[tuple[int, str]]) -> int:
    """Runs the blocks of a page in a directory of its own; returns 1 if one fails."""
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        os.environ |= {
            "SAGEMAKER_BASE_DIR": directory,
            "SM_OUTPUT_DATA_DIR": directory,
            "SM_CHANNEL_TRAINING": f"{directory}/training",
            "SM_HP_MP_PARAMETERS": '{"partitions": 1}',
        }
        Path(directory, "training_0").touch()
        names = make_names()
        torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        for line, source in blocks:
            try:
                exec(compile("\n" * line + source, page, "exec"), names)
            except BaseException:
                traceback.print_exc()
                return 1
    return 0


def main() -> None:
    failed = 0
    for page, blocks in json.load(sys.stdin).items():
        child = os.fork()
        if child == 0:
            code = run_page(page, blocks)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        failed |= os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
