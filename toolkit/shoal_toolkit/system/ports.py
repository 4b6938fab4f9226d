"""Chooses the port for the rendezvous of a job on one host: the default one, which it reserves, or a free one."""

from __future__ import annotations

import _socket  # `socket` is slow to import
import errno


def find_free_port(default: str) -> str:
    """Returns a port for a job of one host: the default one, or another if a second job on this machine uses it.

    The default one is reserved until this process ends, the other is not.
    """
    port = int(default)
    if _reserve(port) and not any(_is_taken(family, port) for family in (_socket.AF_INET, _socket.AF_INET6)):
        return default
    return choose_port()


def choose_port() -> str:
    """Returns a free port, which others cannot guess until a process listens there."""
    probe = _socket.socket()
    probe.bind(("127.0.0.1", 0))
    free = str(probe.getsockname()[1])
    probe.close()
    return free


def _reserve(port: int) -> bool:
    """Reserves a port until this process ends: the script may listen only seconds later."""
    # The names of abstract sockets belong to the network namespace, like ports.
    mark = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    try:
        mark.bind(f"\0shoal-master-port-{port}")
    except OSError:
        mark.close()
        return False
    mark.detach()  # stays open
    return True


def _is_taken(family: int, port: int) -> bool:
    """False for any other error. Reading /proc/net/tcp instead would take the kernel milliseconds."""
    try:
        probe = _socket.socket(family, _socket.SOCK_STREAM)
    except OSError:
        return False
    try:
        # Allows a port that torch's server closed a moment ago.
        probe.setsockopt(_socket.SOL_SOCKET, _socket.SO_REUSEADDR, 1)
        probe.bind(("" if family == _socket.AF_INET else "::", port))
    except OSError as error:
        return error.errno == errno.EADDRINUSE
    finally:
        probe.close()
    return False
