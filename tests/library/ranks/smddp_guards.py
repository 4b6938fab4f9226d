"""A rank of a job in which something goes wrong; it prints its error. `smddp_guards.py WHAT`."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import _broadcast_coalesced as broadcast_coalesced  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401 (registers the backend)

logging.basicConfig(stream=sys.stdout, format="%(message)s")


def dawdle(seconds: float) -> None:
    time.sleep(seconds)


def late() -> None:
    """Rank 1 comes after the others have given up, and gets an error that says so."""
    if RANK == 1:
        dawdle(6)
    dist.all_reduce(torch.ones(10))


def last_is_late() -> None:
    if dist.get_world_size() - 1 == RANK:
        dawdle(6)
    dist.all_reduce(torch.ones(10))


def late_but_in_time() -> None:
    if RANK == 1:
        dawdle(2)
    dist.all_reduce(torch.ones(10))
    print("reduced")


def stopped() -> None:
    if RANK == 1:
        print("stopping", flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.all_reduce(torch.ones(10))


def apart() -> None:
    """What one rank alone does, the others do not wait for: nothing is mixed up."""
    if RANK == 1:
        dist.broadcast(torch.ones(5), src=0)
    else:
        dist.all_reduce(torch.ones(10))
    dist.barrier()


def other_sizes() -> None:
    """gloo's own collectives would end the process."""
    dist.all_reduce(torch.ones(10 + 10 * RANK))


def ended() -> None:
    if RANK == 1:
        os._exit(3)
    dist.all_reduce(torch.ones(10))


def apart_earlier() -> None:
    """A root waits for nobody: the next collective tells."""
    dist.broadcast(torch.ones(5), src=RANK)
    dist.barrier()


def interrupted() -> None:
    """A signal's handler may raise while this rank waits, and may come more often than it looks around."""
    ticks = []

    def tick(*_: object) -> None:
        ticks.append(time.monotonic())
        if len(ticks) == 20:
            raise KeyboardInterrupt

    if RANK == 1:
        time.sleep(60)
    signal.signal(signal.SIGALRM, tick)
    signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
    try:
        dist.barrier()
    except KeyboardInterrupt:
        signal.setitimer(signal.ITIMER_REAL, 0)
        print("interrupted")
        os._exit(0)


def another_model() -> None:
    layers = [torch.nn.Linear(2, 3 + RANK), torch.nn.Linear(4, 4)]
    DistributedDataParallel(torch.nn.Sequential(*layers))


def another_order() -> None:
    model = torch.nn.Module()
    for name in ("first", "second")[:: 1 - 2 * RANK]:
        model.register_parameter(name, torch.nn.Parameter(torch.ones(3)))
    DistributedDataParallel(model)


def weights_apart() -> None:
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    for step in range(5):
        model(torch.ones(1, 2)).sum().backward()
        if step == 2 and RANK == 1:
            torch.nn.init.zeros_(model.module.bias)
    print("went on")


def ended_before_a_handle() -> None:
    """Rank 1 ends; whoever waits for a handle gets an error: a script, torch's function, and torch's C++."""
    if RANK == 1:
        os._exit(3)
    calls: dict[str, Callable[[], object]] = {
        "handle": lambda: dist.all_reduce(torch.ones(10), async_op=True).wait(),
        "no handle": lambda: (dist.all_reduce(torch.ones(10), async_op=True), dist.all_reduce(torch.ones(10))),
        "future": lambda: dist.all_reduce(torch.ones(10), async_op=True).get_future().wait(),
        "C++": lambda: broadcast_coalesced(dist.distributed_c10d._get_default_group(), [torch.ones(10)], 100, 0),
    }
    for name, call in calls.items():
        try:
            call()
        except Exception as error:
            assert "rank 1" in str(error), error
            print(f"{name}: {type(error).__name__}")


def ended_in_backward() -> None:
    """Rank 1 ends when its first bucket is ready; the others name that bucket."""
    layers = [torch.nn.Linear(300, 300) for _ in range(4)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.5)
    for _ in range(4):  # buckets are formed anew after the first
        model(torch.ones(1, 300)).sum().backward()
    if RANK == 1:
        layers[2].weight.register_hook(lambda _: os._exit(3))  # type: ignore[no-untyped-call]
    model(torch.ones(1, 300)).sum().backward()


def late_in_backward() -> None:
    """Rank 1 takes long to come to its first bucket."""
    layers = [torch.nn.Linear(300, 300) for _ in range(4)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.5)
    for _ in range(4):
        model(torch.ones(1, 300)).sum().backward()
    if RANK == 1:
        layers[2].weight.register_hook(lambda _: dawdle(2))  # type: ignore[no-untyped-call]
    model(torch.ones(1, 300)).sum().backward()


timeout = timedelta(seconds=float(os.environ.get("SECONDS") or 60))
dist.init_process_group(backend="smddp", timeout=timeout)
RANK = dist.get_rank()
print("up", flush=True)

try:
    globals()[sys.argv[1]]()
except Exception as error:
    print(f"{type(error).__name__}: {error}")
