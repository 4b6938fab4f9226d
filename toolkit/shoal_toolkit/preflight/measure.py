"""Measures latency, bandwidth and clocks between two hosts, for `train --preflight`. Both run threads that block.

The measured host sends a nonce, and the measuring host answers with a proof of the job's secret. Without the proof the
connection ends. Then the measuring host sends "p" and gets the other's clock, a few times. At last it sends "d" and as
much data as fits into a tenth of a second, and gets the number of bytes. The answers have no tags.
"""

from __future__ import annotations

import _thread
import hmac
import os
import socket
import struct
import time
from collections import deque
from collections.abc import Callable

from shoal_toolkit.hosts import wire
from shoal_toolkit.hosts.messages import Measured
from shoal_toolkit.system.loop import READ, Loop

_PINGS = 20
_SEND_SECONDS = 0.1
_TIMEOUT_SECONDS = 3.0  # of each step
_CLOCK, _COUNT = struct.Struct("!d"), struct.Struct("!Q")
_CHUNK = bytes(1 << 18)
_NONCE_BYTES = 16
_PROOF_BYTES = 64


class NetworkMeter:
    """Measures the way to other hosts, and lets them measure the way to this one, until `close`.

    Creating it opens a port, and starts a thread that accepts connections.
    """

    def __init__(self, loop: Loop, secret: str) -> None:
        self._loop, self._secret = loop, secret
        self._done: deque[tuple[Callable[[Measured], None], Measured]] = deque()
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        loop.watch(self._read, READ, self._on_done)
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        self._listener = socket.create_server(("", 0), family=family, dualstack_ipv6=both, backlog=128)
        self.port: int = self._listener.getsockname()[1]
        _thread.start_new_thread(self._accept_forever, ())

    def close(self) -> None:
        """Stops calling back, and closes the port. Threads end with the process."""
        self._loop.unwatch(self._read, READ)
        self._listener.close()

    def measure(self, host: str, port: int, on_measured: Callable[[Measured], None]) -> None:
        """Measures the way to a host in a thread. The loop calls `on_measured` later, also for a failure."""

        def measure_host() -> None:
            """Body of the thread: measures, and wakes the loop."""
            self._done.append((on_measured, _try_measure(host, port, self._secret)))
            os.write(self._write, b".")

        _thread.start_new_thread(measure_host, ())

    def _on_done(self) -> None:
        os.read(self._read, 4096)
        while self._done:
            on_measured, measured = self._done.popleft()
            on_measured(measured)

    def _accept_forever(self) -> None:
        """Body of a thread: starts a thread for each connection, until the port is closed."""
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            try:
                _thread.start_new_thread(_serve, (sock, self._secret))
            except RuntimeError:  # too many threads, because strangers connect and say nothing
                sock.close()


def _serve(sock: socket.socket, secret: str) -> None:
    """Body of a thread: answers pings with this host's clock, then counts the data. Needs a proof of the secret."""
    try:
        with sock:
            sock.settimeout(_TIMEOUT_SECONDS)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            nonce = os.urandom(_NONCE_BYTES)
            sock.sendall(nonce)
            if not hmac.compare_digest(_make_proof(secret, nonce), _receive(sock, _PROOF_BYTES)):
                return
            while sock.recv(1) == b"p":
                sock.sendall(_CLOCK.pack(time.time()))
            count = 0
            buffer = bytearray(len(_CHUNK))
            while size := sock.recv_into(buffer):
                count += size
            sock.sendall(_COUNT.pack(count))
    except OSError:
        return  # the other side reports it


def _make_proof(secret: str, nonce: bytes) -> bytes:
    return wire.make_proof(secret, "measuring", {"nonce": nonce.hex()}).encode()


def _try_measure(host: str, port: int, secret: str) -> Measured:
    try:
        with socket.create_connection((host, port), _TIMEOUT_SECONDS) as sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.sendall(_make_proof(secret, _receive(sock, _NONCE_BYTES)))
            latency, skew = _ping(sock)
            return Measured(host, int(latency * 1e6), _count_bytes_per_second(sock), round(skew * 1e3), "")
    except socket.gaierror as error:
        return Measured(host, 0, 0, 0, f"its name is unknown ({error.strerror})")
    except OSError as error:
        return Measured(host, 0, 0, 0, f"no connection to its port {port} ({error})")


def _ping(sock: socket.socket) -> tuple[float, float]:
    """Returns the median round trip, and how far the other clock is ahead by the fastest ping, in seconds."""
    found = []
    for _ in range(_PINGS):
        sent, began = time.time(), time.monotonic()
        sock.sendall(b"p")
        (clock,) = _CLOCK.unpack(_receive(sock, _CLOCK.size))
        seconds = time.monotonic() - began
        found.append((seconds, clock - sent - seconds / 2))
    return sorted(found)[_PINGS // 2][0], min(found)[1]


def _count_bytes_per_second(sock: socket.socket) -> int:
    """Sends data for a tenth of a second, and returns the rate at which the other host has received it."""
    began = time.monotonic()
    sock.sendall(b"d")
    while time.monotonic() - began < _SEND_SECONDS:
        sock.sendall(_CHUNK)
    sock.shutdown(socket.SHUT_WR)
    (count,) = _COUNT.unpack(_receive(sock, _COUNT.size))
    return int(count / (time.monotonic() - began))


def _receive(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = sock.recv(size - len(data))
        if not part:
            raise ConnectionError("it closed the connection")
        data += part
    return data
