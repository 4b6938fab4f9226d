"""What the store and the transport of a job have in common: addresses, deadlines, and how a lost host is noticed."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
import time

LOSS_SECONDS = 12.0
"""A connection to a host that does not answer any more ends after so long."""
_SIOCGIFADDR = 0x8915
_IDLE_SECONDS, _PROBE_SECONDS, _PROBES = 4, 2, 4  # 4 + 4 × 2 s: the kernels ask and answer, whatever the processes do


def own_address(towards: str) -> str:
    """The address of this host by which hosts that reach `towards` reach it, as far as its routes tell.

    Raises OSError if the name has no address, or no route leads there.
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


def address_of(interface: str) -> str:
    """The IPv4 address of a network interface of this host, by its name. Raises OSError if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        found = fcntl.ioctl(asked.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
    return socket.inet_ntoa(found[20:24])


def is_loopback(address: str) -> bool:
    """Whether only this host reaches that address."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def listen(address: str, port: int = 0) -> socket.socket:
    """A socket that listens at one address of this host, port 0: a free one. Raises OSError if it cannot."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=1024)


def watch_connection(sock: socket.socket) -> None:
    """Have an idle connection end within LOSS_SECONDS if the other host does not answer any more.

    The kernels answer for their processes: one that computes, or is stopped, is not taken for lost. A connection that
    waits for bytes of its own to be acknowledged is not idle: see `limit_acknowledgement`.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_SECONDS)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_SECONDS)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)


def limit_acknowledgement(sock: socket.socket, seconds: float) -> None:
    """Have the connection end when what was sent is not acknowledged for so long; 0: as long as the kernel tries.

    A peer that reads nothing while its buffers are full counts as one that does not answer. So this is for messages
    that always fit.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * seconds))


def read_exactly(sock: socket.socket, size: int, deadline: float | None = None) -> bytes:
    """The next `size` bytes of a connection; for `deadline` and errors see `read_some`."""
    found = bytearray()
    while len(found) < size:
        found += read_some(sock, size - len(found), deadline)
    return bytes(found)


def read_some(sock: socket.socket, most: int, deadline: float | None = None) -> bytes:
    """What has come on a connection, once something has.

    deadline: by time.monotonic. It changes the socket's own timeout, which counts if it is None.

    Raises TimeoutError (before Python 3.10 another OSError) after the deadline, EOFError at the end of the connection.
    """
    if deadline is not None:
        sock.settimeout(max(deadline - time.monotonic(), 1e-3))
    part = sock.recv(min(most, 1 << 20))
    if not part:
        raise EOFError("the connection has ended")
    return part
