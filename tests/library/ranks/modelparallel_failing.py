"""Jobs of three stages, one of which fails at a point drawn at random: modelparallel_failing.py SEED COUNT DIRECTORY.

A rank is a fork of this process, which has imported torch and has no threads: a job takes a fraction of a second.
Prints, as a line of JSON, each point and how its ranks ended.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import socket
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.fx.experimental.symbolic_shapes  # the first backward would in every rank, for half a second
from torch import nn

import smdistributed.modelparallel.torch as smp

STAGES, MICROBATCHES, LAYERS, LIMIT_S = 3, 4, 6, 60


@dataclass(frozen=True)
class Point:
    """how: `raise` or `kill`. where: in the `forward` or `backward` of a layer, or `between` steps; at which time."""

    how: str
    where: str
    layer: int
    at: int
    pipeline: str
    deterministic: bool
    stages: tuple[int, ...]

    @classmethod
    def draw(cls, draw: random.Random) -> Point:
        where = draw.choice(("forward", "backward", "between"))
        return cls(
            how=draw.choice(("raise", "kill")),
            where=where,
            layer=draw.randrange(LAYERS),
            at=draw.randint(1, 3 if where == "between" else 3 * MICROBATCHES),
            pipeline=draw.choice(("simple", "interleaved")),
            deterministic=draw.random() < 0.5,
            stages=tuple(draw.randrange(STAGES) for _ in range(LAYERS)),
        )

    @property
    def stage(self) -> int:
        return self.stages[self.layer]


class Fuse:
    """Fails when it is reached for the last time."""

    def __init__(self, how: str, left: int, moment: Path) -> None:
        self.how, self.left, self.moment = how, left, moment

    def reach(self, _: object = None) -> None:
        self.left -= 1
        if self.left:
            return
        self.moment.write_text(str(time.monotonic()))
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ArithmeticError("this fails")


class Layer(nn.Linear):
    """fuse: reached in its `forward`, or `backward`."""

    fuse: Fuse
    where = ""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        if self.where == "forward":
            self.fuse.reach()
        result = super().forward(value).tanh()
        if self.where == "backward":
            result.register_hook(self.fuse.reach)  # type: ignore[no-untyped-call]
        return result


class Net(nn.Module):
    """Layers in a row, of which each needs the first one's result too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(8, 8) for _ in range(LAYERS))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        first = value = self.layers[0](value)
        for layer in self.layers[1:]:
            value = layer(value) + first
        return value


@smp.step
def train_step(model: Any, data: torch.Tensor) -> Any:
    loss = model(data).square().mean()
    model.backward(loss)
    return loss


def train(point: Point, moment: Path) -> None:
    """Until a failure ends it."""
    values = {"partitions": STAGES, "microbatches": MICROBATCHES, "auto_partition": False, "default_partition": 0}
    smp.init({**values, "pipeline": point.pipeline, "deterministic_server": point.deterministic})
    module, fuse = Net(), Fuse(point.how, point.at, moment)
    for layer, stage in zip(module.layers, point.stages):
        smp.set_partition(layer, stage)
    failing: Any = module.layers[point.layer]
    failing.fuse, failing.where = fuse, point.where
    model = smp.DistributedModel(module)
    while True:
        train_step(model, torch.ones(MICROBATCHES, 8))
        if point.where == "between" and smp.rank() == point.stage:
            fuse.reach()


def start(rank: int, port: int, point: Point, directory: Path) -> int:
    """The process of a rank, which writes to a file by its number. It ends at once: tidying up after a fork is slow."""
    process = os.fork()
    if process:
        return process
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(STAGES), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    log = os.open(directory / str(rank), os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        train(point, directory / "moment")
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def status(process: int, until: float) -> int | None:
    """The exit code of a process, negative for a signal; None: it had not ended by then, and was killed."""
    descriptor = os.pidfd_open(process)
    ended, _, _ = select.select([descriptor], [], [], max(0.0, until - time.monotonic()))
    os.close(descriptor)
    if not ended:
        os.kill(process, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    return code if ended else None


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def run(point: Point, directory: Path) -> dict[str, Any]:
    """How the ranks of a job ended, and how many seconds after the failure the last one did."""
    directory.mkdir()
    port, until = free_port(), time.monotonic() + LIMIT_S
    processes = [start(rank, port, point, directory) for rank in range(STAGES)]
    codes = [status(process, until) for process in processes]
    ended, moment = time.monotonic(), directory / "moment"
    seconds = ended - float(moment.read_text()) if moment.exists() else None
    logs = [(directory / str(rank)).read_text() for rank in range(STAGES)]
    return {**asdict(point), "stage": point.stage, "seconds": seconds, "codes": codes, "logs": logs}


def main(seed: str, count: str, directory: str) -> None:
    draw = random.Random(int(seed))
    for number in range(int(count)):
        print(json.dumps(run(Point.draw(draw), Path(directory, str(number)))), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
