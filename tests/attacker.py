"""A program that attacks the agent of a worker without the job's secret, until it is killed: attacker.py WORKER NOTE.

It opens connections as fast as they come. It holds some of them open, and sends on others what no host sends: frames
that are deep, endless, of the wrong kind, or no frames. When it has been hung up on for the first time, it makes the
file NOTE. It runs in containers, which have Python and not the tests' packages.
"""

from __future__ import annotations

import pathlib
import socket
import sys
import time
from collections import deque

PORT = 7411
_HELD = 200


def frame(kind: bytes, payload: bytes) -> bytes:
    return (len(payload) + 1).to_bytes(4, "big") + kind + payload


STREAMS = (
    b"",
    b"GET / HTTP/1.1\r\n\r\n",
    b"\xff" * 64,
    b"\0\0\x0f\xff",
    frame(b"P", b'{"nonce": ' + b"[" * 2000),
    frame(b"P", b'{"nonce": Infinity, "hosts": 1e999, "proof": NaN}'),
    frame(b"P", b'{"nonce": "%s", "hosts": "%s", "proof": "%s"}' % (b"0" * 32, b"0" * 64, b"0" * 64)),
    frame(b"S", b'{"command": "orted"}'),
    frame(b"V", b'{"code": 0, "message": "", "report": {}}'),
    frame(b".", b"") * 999,
)


def attack(worker: str, note: pathlib.Path) -> None:
    held: deque[socket.socket] = deque()
    count = 0
    while True:
        count += 1
        try:
            sock = socket.create_connection((worker, PORT), timeout=1)
            sock.sendall(STREAMS[count % len(STREAMS)])
        except OSError:  # it does not listen yet, or not any more, or has hung up
            time.sleep(0.01)
            continue
        held.append(sock)
        if len(held) > _HELD:
            with held.popleft() as oldest:
                oldest.setblocking(False)
                _note_hanging_up(oldest, note)


def _note_hanging_up(sock: socket.socket, note: pathlib.Path) -> None:
    try:
        while sock.recv(4096):
            continue
    except BlockingIOError:
        return
    except OSError:
        pass
    note.touch()


if __name__ == "__main__":
    attack(sys.argv[1], pathlib.Path(sys.argv[2]))
