"""A rank of test_transport.py: the first sends, and nobody answers; the second waits. Both until the other is lost."""

from __future__ import annotations

import os
import threading
import time

from smdistributed.core.launch import read_launch
from smdistributed.core.store import open_store
from smdistributed.modelparallel.backend.rendezvous import connect_ranks
from smdistributed.modelparallel.backend.transport import Access, Transport

LIMIT_S = 60

launch = read_launch()
arrived, lost, once = threading.Event(), threading.Event(), threading.Lock()


def deliver(source: int, head: bytes, bodies: list[bytearray]) -> None:
    arrived.set()


def lose(source: int) -> None:
    with once:
        if not lost.is_set():
            print(f"rank {launch.rank} has lost rank {source}", flush=True)
        lost.set()


def open_transport(access: Access) -> Transport:
    return Transport(launch.rank, access, deliver, lose)


assert launch.master
store = open_store(launch)
transport = connect_ranks(
    store.prefixed("smp"), launch.rank, 2, launch.master.host, launch.is_on_one_host, open_transport
)
number, deadline = 0, time.monotonic() + LIMIT_S
if launch.rank == 1 and arrived.wait(LIMIT_S):  # maybe already in connect_ranks, which still needs the network then
    print("rank 1 has a message", flush=True)
while launch.rank == 0 and not lost.is_set() and time.monotonic() < deadline:
    try:
        transport.send(1, b"%d" % number)
    except OSError:  # its host was lost before rank 1 could connect back
        lose(1)
    number += 1
    lost.wait(0.05)
os._exit(0 if lost.wait(max(0, deadline - time.monotonic())) else 1)
