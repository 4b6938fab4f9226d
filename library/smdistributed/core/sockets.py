"""Sockets of the store and the transport: addresses, deadlines, and how a lost host is noticed."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
import time

LOSS_SECONDS = 12.0
"""A connection to a host that does not answer ends after so long."""
_SIOCGIFADDR = 0x8915
_IDLE_SECONDS, _PROBE_SECONDS, _PROBES = 4, 2, 4  # 4 + 4 × 2 s: between kernels, so that busy processes do not matter


def own_address(towards: str) -> str:
    """Return the address that this host uses towards another host, by its routes.

    Raises OSError if `towards` has no address, or there is no route to it.
    """
    problem: OSError | None = None
    for family, kind, protocol, _, address in socket.getaddrinfo(towards, 1, type=socket.SOCK_DGRAM):
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.connect(address)  # sends nothing
            except OSError as error:
                problem = error
                continue
            found: str = probe.getsockname()[0]
            return found
    raise problem or OSError(f"{towards} has no address")


def interface_address(interface: str) -> str:
    """Return the IPv4 address of a network interface of this host. Raises OSError if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        found = fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
    return socket.inet_ntoa(found[20:24])


def is_loopback(address: str) -> bool:
    """Whether only this host can reach an address."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def listen(address: str, port: int = 0) -> socket.socket:
    """Listen at one address of this host. Port 0 means a free one. Raises OSError if that fails."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=1024)


def enable_keepalive(sock: socket.socket) -> None:
    """End an idle connection within LOSS_SECONDS if the other host does not answer.

    The kernel answers for a process. One that computes, or is stopped, does not count as lost. A connection that waits
    for an acknowledgement is not idle: see `set_user_timeout`.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_SECONDS)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_SECONDS)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)


def set_user_timeout(sock: socket.socket, seconds: float) -> None:
    """End a connection if sent bytes are not acknowledged for so long. 0: as long as the kernel retries.

    A peer that reads nothing while its buffers are full counts as lost too. So use this for messages that always fit.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * seconds))


def read_exactly(sock: socket.socket, size: int, deadline: float | None = None) -> bytes:
    """Read `size` bytes. For `deadline` and errors see `read_some`."""
    found = bytearray()
    while len(found) < size:
        found += read_some(sock, size - len(found), deadline)
    return bytes(found)


def read_some(sock: socket.socket, most: int, deadline: float | None = None) -> bytes:
    """Wait for bytes, and return those that have arrived.

    Args:
        sock: The connection.
        most: The most bytes to return.
        deadline: In seconds of time.monotonic. Sets the socket's timeout; None leaves it as it is.

    Raises:
        TimeoutError: After the deadline (before Python 3.10 another OSError).
        EOFError: At the end of the connection.
    """
    if deadline is not None:
        sock.settimeout(max(deadline - time.monotonic(), 1e-3))
    part = sock.recv(min(most, 1 << 20))
    if not part:
        raise EOFError("the connection has ended")
    return part
