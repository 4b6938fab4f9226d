"""Sockets of the store and the transport: addresses, and the detection of lost hosts."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct

LOSS_SECONDS = 12.0
"""A connection ends after so long if its host stops answering."""
_SIOCGIFADDR = 0x8915
_IDLE_SECONDS, _PROBE_SECONDS, _PROBES = 4, 2, 4  # 4 + 4 × 2 s: kernels send and answer probes, not processes


def own_address(towards: str) -> str:
    """Returns this host's address on the route to another host. Raises OSError if there is no address or route."""
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
    """Returns the IPv4 address of a network interface of this host, by its name. Raises OSError if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        found = fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
    return socket.inet_ntoa(found[20:24])


def is_loopback(address: str) -> bool:
    """Whether only this host reaches an IP address. Raises ValueError for a name."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def listen(address: str, port: int = 0) -> socket.socket:
    """Opens a socket that listens at one address of this host; port 0: a free one. Raises OSError if it cannot."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=1024)


def prepare_connection(sock: socket.socket) -> None:
    """Sends without delay, and makes an idle connection end within LOSS_SECONDS if the other host stops answering.

    Kernels answer for stopped processes. For data that is not acknowledged, see `set_user_timeout`.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_SECONDS)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_SECONDS)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)


def set_user_timeout(sock: socket.socket, seconds: float) -> None:
    """Makes a connection end if sent data is not acknowledged for so long; 0: as long as the kernel tries.

    A peer that reads nothing while its buffers are full counts as lost too. So use this for messages that always fit.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * seconds))
