"""One rank of tests/library/test_transfers.py: `transfers.py CASE ARGUMENT ...`."""

from __future__ import annotations

import hashlib
import itertools
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.backend.exceptions import SMPRuntimeError
from smdistributed.modelparallel.torch.pipeline.messages import Kind, Message, send

LIMIT_S = 120
THREADS = 3
DTYPES = (torch.float32, torch.float16, torch.int64, torch.bool, torch.complex64)
_Drawn = list[tuple[int, int, list[torch.Tensor]]]


def drawn_by(seed: int, sender: int, thread: int, count: int) -> _Drawn:
    """The messages of one thread of a rank: the receiver, the number there, and the tensors of each."""
    chosen = random.Random(f"{seed}/{sender}/{thread}")
    generator = torch.Generator().manual_seed(chosen.randrange(1 << 31))
    others, sent, found = [rank for rank in range(smp.size()) if rank != sender], dict[int, int](), _Drawn()
    for _ in range(count):
        to = chosen.choice(others)
        sent[to] = sent.get(to, -1) + 1
        shapes = [chosen.choice([(), (0,), (7,), (3, 5, 2), (1 << chosen.randrange(20),)]) for _ in range(3)]
        tensors = [torch.randn(shape, generator=generator) * 9 for shape in shapes[: chosen.randrange(4)]]
        found.append((to, sent[to], [tensor.to(chosen.choice(DTYPES)) for tensor in tensors]))
    return found


class Arrivals:
    """The messages that arrive at this rank, by the rank and thread that sent them."""

    def __init__(self) -> None:
        self.messages: dict[tuple[int, int], list[tuple[int, list[torch.Tensor]]]] = {}
        self._changed = threading.Condition()

    def deliver(self, message: Message) -> None:
        """Keep a message."""
        thread, number = message.about
        tensors = [tensor for tensor in message.all_here() if tensor is not None]
        with self._changed:
            self.messages.setdefault((message.source, thread), []).append((number, tensors))
            self._changed.notify_all()

    def wait_for(self, count: int) -> None:
        """Wait until that many have arrived."""
        with self._changed:
            assert self._changed.wait_for(lambda: sum(map(len, self.messages.values())) == count, LIMIT_S), "waits"


def traffic(seed: str, count: str) -> None:
    """Every rank sends to all others at once, on several threads; all arrives, in order, as it was sent."""
    smp.init({"partitions": int(os.environ["STAGES"])})
    arrivals, rank, transfers = Arrivals(), smp.rank(), cast("Any", smp.state.stage.transfers)
    transfers._deliver = arrivals.deliver
    transfers.begin(1)
    smp.barrier()

    def send_all(thread: int) -> None:
        for to, number, tensors in drawn_by(int(seed), rank, thread, int(count)):
            about = (thread, number)
            send(transfers._transport, to, Kind.FORWARD, 1, about=about, tensors=tensors, transfers=transfers)
            for tensor in tensors:
                tensor.zero_()  # as a module does that changes its input in place

    threads = [threading.Thread(target=send_all, args=(thread,), daemon=True) for thread in range(THREADS)]
    for each in threads:
        each.start()
    expected = {}
    for sender, thread in itertools.product((r for r in range(smp.size()) if r != rank), range(THREADS)):
        drawn = drawn_by(int(seed), sender, thread, int(count))
        expected[sender, thread] = [(number, tensors) for to, number, tensors in drawn if to == rank]
    arrivals.wait_for(sum(map(len, expected.values())))
    for key, messages in expected.items():
        check(arrivals.messages.get(key, []), messages)
    smp.barrier()
    print(f"all {sum(map(len, expected.values()))} messages\n", end="")


def check(found: Any, sent: Any) -> None:
    assert [number for number, _ in found] == [number for number, _ in sent], "out of order"
    for (_, here), (_, there) in zip(found, sent):
        assert [tensor.dtype for tensor in here] == [tensor.dtype for tensor in there]
        assert all(map(torch.equal, here, there))


class Block(nn.Module):
    """Some layers that change what they get in place, and a skip."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.drop = nn.Dropout(0.2)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = value + self.drop(self.second(functional.relu_(self.first(value))))
        return result


@smp.step
def train_step(model: Any, data: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(data).square().mean()
    model.backward(loss)
    return loss


def job(device: str) -> tuple[Any, Any, torch.Tensor]:
    smp.init({"partitions": int(os.environ["STAGES"]), "microbatches": 4})
    if device == "cuda":
        torch.cuda.set_device(smp.local_rank())
    torch.manual_seed(0)
    module = nn.Sequential(*(Block(16) for _ in range(6)), nn.Linear(16, 4)).to(device)
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(module.parameters(), 0.01))
    return model, optimizer, torch.randn(32, 16).to(device)


def pipeline(device: str) -> None:
    """Train, and print a digest of all that came out: each bit of losses and parameters."""
    model, optimizer, data = job(device)
    digest = hashlib.sha256()
    for _ in range(5):
        optimizer.zero_grad()
        digest.update(train_step(model, data).reduce_mean().detach().cpu().numpy().tobytes())
        optimizer.step()
    for name, parameter in sorted(model.local_named_parameters()):
        digest.update(name.encode() + parameter.detach().cpu().numpy().tobytes())
    print(f"digest {smp.rank()} {digest.hexdigest()}\n", end="")


def dies(how: str) -> None:
    """The last stage ends in the middle of a transfer (dies), or never begins its part of one (hangs)."""
    model, _, data = job("cpu")
    train_step(model, data)
    transfers: Any = smp.state.stage.transfers

    def receive(*_: object) -> None:
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(LIMIT_S)

    if smp.rank() == smp.size() - 1:
        transfers._carrier.receive = receive
    try:
        train_step(model, torch.cat([data] * 4096))
    except SMPRuntimeError as error:
        print(f"rank {smp.rank()} has ended: {error}", flush=True)
        os._exit(0)


if __name__ == "__main__":
    cases: dict[str, Callable[..., None]] = {"traffic": traffic, "pipeline": pipeline, "dies": dies}
    cases[sys.argv[1]](*sys.argv[2:])
