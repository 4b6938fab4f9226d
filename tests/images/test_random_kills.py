"""A job that is killed at random moments trains as if it had not been: two hosts of `shoal run --engine none`."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ..repeats import SEED, times

SHOAL = Path(sys.executable).with_name("shoal")
HOSTS = ("127.0.0.1", "127.0.0.2")
LIMIT_S = times(120, 600)  # the soak also runs beside other load
SCRIPT = """\
import argparse, os, pathlib, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
import shoal_checkpoint as platform
from shoal_checkpoint.torch import Checkpoint

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int)
parser.add_argument("--log")
parser.add_argument("--pause", type=float, default=0.0)
given = parser.parse_args()
rank = int(os.environ["RANK"])
log = pathlib.Path(given.log, f"rank-{rank}")
log.with_suffix(".pid").write_text(str(os.getpid()))
torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(rank)
model = DistributedDataParallel(
    torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Dropout(0.3), torch.nn.Linear(64, 1))
)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
data = torch.arange(40.0)
dataset = TensorDataset((data[:, None] * 0.1 + torch.arange(64.0)).sin(), data[:, None] / 40)
loader = DataLoader(dataset, 4, sampler=DistributedSampler(dataset))
checkpoint = Checkpoint(platform.directory(), every=3, model=model, optimizer=optimizer)
with log.open("a", buffering=1) as lines:
    print("trains", flush=True)
    for epoch in checkpoint.epochs(given.epochs):
        for inputs, targets in checkpoint.batches(loader):
            optimizer.zero_grad()
            loss = (model(inputs) - targets).square().mean()
            loss.backward()
            optimizer.step()
            lines.write(f"{checkpoint.step} {loss.item().hex()}\\n")
            time.sleep(given.pause)
"""
# In the suite, each cut of the connection between two `train` would cost 10 s, in which a first host may end too.
KINDS = ["rank"] * 3 + ["save"] * 2 + ["restart"] * 2 + ["network"] + ["first host", "other host"]


class Job:
    """A job that runs, and how to kill parts of it."""

    def __init__(self, directory: Path, epochs: int, pause: float = 0) -> None:
        source, self.log, self.checkpoints = directory / "code", directory / "log", directory / "jobs"
        for each in (source, self.log):
            each.mkdir(parents=True)
        (source / "train.py").write_text(SCRIPT)
        self.jobs = directory / "jobs"
        command: list[str | Path] = [SHOAL, "run", "image:1", "--engine", "none", "--hosts", "2:2"]
        command += ["--max-restarts", "9999", "--source", source, "--entry-point", "train.py", "--output", self.jobs]
        command += ["--hyperparameter", f"epochs={epochs}", "--hyperparameter", f"log={self.log}"]
        command += ["--hyperparameter", f"pause={pause}"]
        self.output = directory / "output"
        with self.output.open("w") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=output)

    @property
    def trees(self) -> list[Path]:
        (directory,) = self.jobs.iterdir()
        return [directory / host for host in HOSTS]

    def size(self) -> int:
        """The length of the logs, which grows with each step."""
        return sum(path.stat().st_size for path in self.log.glob("rank-?"))

    def until(self, condition: Callable[[], object], interval: float = 0.01) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            assert self.process.poll() is None, self.output.read_text()[-4000:]
            assert time.monotonic() < deadline, self.output.read_text()[-4000:]
            time.sleep(interval)

    def processes(self, tree: Path) -> list[int]:
        """All processes of a host: `train`, and what it has started."""
        mark = f"SAGEMAKER_BASE_DIR={tree}\0".encode()
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if mark in path.read_bytes() + b"\0":
                    found.append(int(path.parent.name))
        return found

    def have_standbys(self) -> bool:
        """Whether each host has the process that forks ranks. Without it, each restart imports torch again."""
        standby = b"shoal_toolkit.sidecars.standby"
        return all(any(standby in command_line(pid) for pid in self.processes(tree)) for tree in self.trees)

    def ranks(self) -> list[int]:
        """The processes of the script, in the order of their ranks."""
        alive = {pid for tree in self.trees for pid in self.processes(tree)}
        pids = [int(self.log.joinpath(f"rank-{rank}.pid").read_text() or 0) for rank in (0, 1)]
        return [pid for pid in pids if pid in alive]

    def kill(self, kind: str, drawn: random.Random) -> None:
        """Kill something as soon as the job has trained again, or for `restart` while it starts."""
        if kind != "restart":
            before = self.size()
            self.until(lambda: self.size() > before)
        if kind == "save":
            self.until(lambda: list(self.trees[0].glob("checkpoints/*.partial")), 0.001)
        else:
            time.sleep(drawn.uniform(0, 0.2))
        if kind == "network":
            for pid in self.ranks():
                cut_connections(pid)
        elif kind.endswith("host"):
            end(self.processes(self.trees[kind == "other host"]))
        else:
            end(drawn.sample(ranks, 1) if (ranks := self.ranks()) else [])


def command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def end(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def cut_connections(pid: int) -> None:
    """Shut down the TCP connections of a process, as a network that is lost."""
    with contextlib.suppress(OSError):  # it has ended
        handle = os.pidfd_open(pid)
        try:
            for path in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError), open_socket(handle, int(path.name)) as connection:
                    if connection.family == socket.AF_INET and connection.getpeername():
                        connection.shutdown(socket.SHUT_RDWR)
        finally:
            os.close(handle)


def open_socket(handle: int, descriptor: int) -> socket.socket:
    """Return the socket of another process (`pidfd_getfd`). Raises OSError if it is not a socket."""
    copy = ctypes.CDLL(None, use_errno=True).syscall(438, handle, descriptor, 0)
    if copy < 0:
        raise OSError(ctypes.get_errno(), "pidfd_getfd")
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise


def curve(log: Path) -> dict[str, str]:
    """The loss of each step and rank. Steps that were trained again have the same loss, or this fails."""
    found: dict[str, str] = {}
    for rank in (0, 1):
        for line in lines_of(log / f"rank-{rank}"):
            step, _, loss = line.partition(" ")
            assert found.setdefault(f"{rank}/{step}", loss) == loss, f"step {step} of rank {rank} differs"
    return found


def lines_of(path: Path) -> Iterator[str]:
    """The complete lines of a log: a rank may have been killed while it wrote."""
    return (line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n"))


@pytest.mark.soak
@pytest.mark.long
def test_killed_at_random_moments_a_job_trains_as_if_it_had_not_been(tmp_path: Path) -> None:
    drawn = random.Random(SEED)
    kinds = KINDS * times(1, 22)
    drawn.shuffle(kinds)
    if len(kinds) == len(KINDS):  # a new host has no standby for seconds
        kinds.sort(key=lambda kind: kind.endswith("host"))
    killed = Job(tmp_path / "killed", 10**6, pause=0.02)
    killed.until(lambda: killed.size() and killed.have_standbys(), 0.1)
    for kind in kinds:
        killed.kill(kind, drawn)
    before = killed.size()
    killed.until(lambda: killed.size() > before)
    killed.process.send_signal(signal.SIGINT)
    assert killed.process.wait(LIMIT_S) == 130, killed.output.read_text()[-4000:]
    (job,) = killed.jobs.iterdir()
    assert json.loads((job / "request.json").read_text())["uncollected"] is False
    output = killed.output.read_text()
    assert "CheckpointError" not in output
    assert output.count("restart ") >= len(kinds) - kinds.count("restart"), "some kills were without effect"
    losses = curve(killed.log)
    epochs = max(int(step.partition("/")[2]) for step in losses) // 5 + 1
    whole = Job(tmp_path / "whole", epochs)
    assert whole.process.wait(LIMIT_S) == 0, whole.output.read_text()[-4000:]
    expected = curve(whole.log)
    assert losses == {step: expected[step] for step in losses}
    assert len(losses) >= 2 * len(kinds)
