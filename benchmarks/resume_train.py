"""The script of benchmarks/resume.py: data parallel training with gloo, a checkpoint every 10 steps.

It writes lines to RESUME_DIRECTORY/marks: an event, the rank, the pid, the time, the number of
a completed step, and the number of ranks.
"""

from __future__ import annotations

import time

BEGAN = time.time()

import os  # noqa: E402
from pathlib import Path  # noqa: E402

import torch  # noqa: E402
from torch import distributed, nn  # noqa: E402

DIRECTORY = Path(os.environ["RESUME_DIRECTORY"])
STATE = DIRECTORY / "state.pt"
STEP_SECONDS = 0.02  # a step of a small model would be too short for a goodput
EVERY = 10


def mark(event: str, when: float, step: int = 0) -> None:
    """Append a line; it is shorter than a page, so that the lines of two ranks don't mix."""
    with (DIRECTORY / "marks").open("a") as file:
        file.write(f"{event} {os.environ['RANK']} {os.getpid()} {when:.6f} {step} {os.environ['WORLD_SIZE']}\n")


def main() -> None:
    """Train until the number of steps, from the last checkpoint on."""
    mark("began", BEGAN)
    mark("imported", time.time())
    distributed.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    step = 0
    if STATE.exists():
        state = torch.load(STATE)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    mark("loaded", time.time(), step)
    while step < int(os.environ["RESUME_STEPS"]):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(torch.randn(32, 64)), torch.randint(0, 10, (32,))).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        time.sleep(STEP_SECONDS)
        step += 1
        mark("step", time.time(), step)
        if step % EVERY == 0 and distributed.get_rank() == 0:
            part = STATE.with_suffix(".part")
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, part)
            part.replace(STATE)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
