"""Counts the library's Python frames between torch and the compiled engine, for one gradient; prints both paths.

`gradient_path.py`: a job of one rank, whose reducer calls `allreduce` in backward, and one synchronous all_reduce.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

import smdistributed.dataparallel.torch.distributed as smddp
from smdistributed.core import native

Path = list[str]


def library_frames(frame: FrameType | None) -> Path:
    """The functions of this library on the stack, innermost last."""
    found = []
    while frame is not None:
        if "/smdistributed/core/" in frame.f_code.co_filename:
            found.append(frame.f_code.co_name)
        frame = frame.f_back
    return found[::-1]


queued: list[Path] = []
at_the_engine: list[Path] = []


def note_queued(frame: FrameType, event: str, argument: Any) -> None:
    if event == "c_call" and getattr(argument, "__name__", "") == "put":
        queued.append(library_frames(frame))


def note_engine(*arguments: Any) -> int:
    at_the_engine.append(library_frames(sys._getframe(1)))
    return int(all_reduce(*arguments))


smddp.init_process_group()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
library = native.load()
all_reduce = library.engine_all_reduce
setattr(library, "engine_all_reduce", note_engine)  # noqa: B010 (ctypes' attributes are of its own type)

loss = model(torch.ones(1, 4)).sum()
sys.setprofile(note_queued)
loss.backward()
sys.setprofile(None)
print("gradient:", *queued[0], "|", *at_the_engine.pop())
assert not at_the_engine, "one bucket"
dist.all_reduce(torch.ones(4))
print("synchronous:", *at_the_engine.pop())
dist.destroy_process_group()
