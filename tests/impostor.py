"""A program that speaks to a worker as the first host of a job does: impostor.py WORKER SOURCE SECRET WHEN.

It connects from the address SOURCE (or any, if SOURCE is empty), proves SECRET, and has the worker start its orted.
WHEN: `ready` sends START once the worker is ready, as a first host does; `before` and `after` also send it directly
before and after the proof, without waiting for a welcome. `twice` sends it twice, `unplanned` asks for an orted with a
parameter of which no plan knows, and `script` for the script instead. It prints as JSON what it received.

It runs in containers and network namespaces, which have shoal_toolkit but not the tests' packages. START asks for an
orted with the option `--mca orte_node_regex SECRET-WHEN`; the tests put a program of this name (`ORTED`) on PATH.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from typing import Any

from shoal_toolkit.hosts import messages, wire
from shoal_toolkit.system.loop import Loop

PORT = 7411
FIRST, WORKER = HOSTS = ("algo-1", "algo-2")
LIMIT_S = 30.0
# Notes each of its starts in a file of the worker: what was started is seen by its effect.
STARTED = "started"
ORTED = f'#!/bin/sh\necho "$*" >>"$SM_MODEL_DIR/{STARTED}"\n'


def trace(secret: str, when: str) -> str:
    """What `ORTED` notes if an impostor with this secret has had it started."""
    return f"--mca orte_node_regex {secret}-{when}"


class Impostor:
    """One connection to the worker's agent."""

    def __init__(self, loop: Loop, sock: socket.socket, secret: str, when: str) -> None:
        self.received: list[str] = []  # the names of the messages, in order
        self.reason = ""  # why the worker refused it, or what it asked for
        self.is_proved = False  # whether the worker proved the secret too
        self.lost = ""  # how the connection ended
        self._secret, self._when = secret, when
        self._transcript: dict[str, str] = {}
        self._channel = wire.Channel(loop, sock, self._message, self._end)

    def _end(self, reason: str) -> None:
        self.lost = reason

    def _message(self, message: Any) -> None:
        self.received.append(type(message).__name__)
        if isinstance(message, messages.Hello):
            self._answer(message)
        elif isinstance(message, messages.Welcome):
            self.is_proved = message.proof == wire.make_proof(self._secret, "worker", self._transcript)
            self._channel.start(wire.make_seals(self._secret, "first", self._transcript))
        elif isinstance(message, messages.Refused):
            self.reason = message.reason
        elif isinstance(message, messages.Ready):
            self._start()
        elif isinstance(message, messages.CommandEnded):
            self._channel.send(messages.JobEnded(0, "", {}))
        elif isinstance(message, messages.HostFailed):
            self.reason = message.message
            self._channel.send(messages.JobEnded(message.code, message.message, {}))

    def _answer(self, hello: messages.Hello) -> None:
        self._transcript = {
            "first": FIRST,
            "worker": WORKER,
            "hosts": wire.hash_hosts(HOSTS),
            "first_nonce": wire.make_nonce(),
            "worker_nonce": hello.nonce,
        }
        proof = wire.make_proof(self._secret, "first", self._transcript)
        if self._when == "before":
            self._start()
        self._channel.send(messages.Prove(self._transcript["first_nonce"], self._transcript["hosts"], proof))
        if self._when == "after":
            self._start()

    def _start(self) -> None:
        asked = "--mca mca_base_component_path /tmp" if self._when == "unplanned" else trace(self._secret, self._when)
        self._channel.send(messages.GO if self._when == "script" else messages.StartDaemon(f"orted {asked}"))
        if self._when == "twice":
            self._channel.send(messages.StartDaemon(f"orted {asked}"))


def connect(worker: str, source: str) -> socket.socket:
    """Connect as soon as the worker listens."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        try:
            return socket.create_connection((worker, PORT), 5, (source, 0) if source else None)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def main(worker: str, source: str, secret: str, when: str) -> None:
    loop = Loop()
    impostor = Impostor(loop, connect(worker, source), secret, when)
    loop.call_later(LIMIT_S, lambda: impostor._end(f"not within {LIMIT_S} s"))
    loop.run_until(lambda: bool(impostor.lost))
    names = ("received", "reason", "is_proved", "lost")
    print(json.dumps({name: getattr(impostor, name) for name in names}))


if __name__ == "__main__":
    main(*sys.argv[1:])
