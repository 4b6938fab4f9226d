"""Hands a rank that mpirun has started over to the standby: `python -SE hand_over.py SOCKET DIRECTORY COMMAND ...`.

It sends its environment, working directory, mask and standard streams to the standby, which forks the rank
(sidecars/standby.py). Then it passes signals on, and ends with the exit code of the rank. If it is killed, the standby
kills the rank. Without a standby that forks, it becomes the command. It imports little, because each rank starts it.
"""

import _socket
import os
import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

_PASSED = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)
_KILLED = 128 + signal.SIGKILL
_RIGHTS = (_socket.SOL_SOCKET, _socket.SCM_RIGHTS)


def main() -> "NoReturn":
    """Hands this process over, or becomes the command."""
    path, directory, *command = sys.argv[1:]
    server = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    waiting: list[int] = []
    for number in _PASSED:
        signal.signal(number, lambda number, _: waiting.append(number))
    if not _request(server, path, directory):
        os.execvpe(command[0], command, os.environ)
    for number in _PASSED:
        signal.signal(number, lambda number, _: server.sendall(bytes([number])))
    server.sendall(bytes(waiting))
    code = server.recv(1)
    os._exit(code[0] if code else _KILLED)


def _request(server: "_socket.socket", path: str, directory: str) -> bool:
    """Asks for a process that runs the rank, and returns whether there is one."""
    mask = os.umask(0)
    os.umask(mask)
    fields = [directory, os.getcwd(), str(mask), *(f"{name}={value}" for name, value in os.environ.items())]
    payload = "\0".join(fields).encode("utf-8", "surrogateescape")
    streams = b"".join(number.to_bytes(4, sys.byteorder) for number in (0, 1, 2))
    try:
        server.connect(path)
        server.sendmsg([len(payload).to_bytes(4, "big")], [(*_RIGHTS, streams)])
        server.sendall(payload)
        return server.recv(1) == b"f"
    except OSError:
        return False


if __name__ == "__main__":
    main()
