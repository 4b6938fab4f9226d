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
_ENDING = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)
_KILLED = 128 + signal.SIGKILL
_ANSWER_SECONDS = 120  # for the imports of the standby
_RIGHTS = (_socket.SOL_SOCKET, _socket.SCM_RIGHTS)


def main() -> "NoReturn":
    """Hands this process over, or becomes the command."""
    path, directory, *command = sys.argv[1:]
    server = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    waiting: list[int] = []
    for number in _PASSED:
        signal.signal(number, lambda number, _: waiting.append(number))
    forked = _request(server, path, directory)
    ending = [number for number in waiting if number in _ENDING]  # others need a handler, which the rank had not yet
    if not forked:
        if ending:
            os._exit(128 + ending[0])
        os.execvpe(command[0], command, os.environ)
    for number in _PASSED:
        signal.signal(number, lambda number, _: _pass_on(server, [number]))
    _pass_on(server, ending)
    code = server.recv(1)
    os._exit(code[0] if code else _KILLED)


def _pass_on(server: "_socket.socket", numbers: "list[int]") -> None:
    """Passes signals on. The rank may have ended meanwhile."""
    try:
        server.sendall(bytes(numbers))
    except OSError:
        return


def _request(server: "_socket.socket", path: str, directory: str) -> bool:
    """Asks for a process that runs the rank, and returns whether there is one."""
    mask = os.umask(0)
    os.umask(mask)
    fields = [directory, os.getcwd(), str(mask), *(f"{name}={value}" for name, value in os.environ.items())]
    payload = "\0".join(fields).encode("utf-8", "surrogateescape")
    streams = b"".join(number.to_bytes(4, sys.byteorder) for number in (0, 1, 2))
    server.settimeout(_ANSWER_SECONDS)
    try:
        server.connect(path)
        server.sendmsg([len(payload).to_bytes(4, "big")], [(*_RIGHTS, streams)])
        server.sendall(payload)
        answer = server.recv(1)
        server.settimeout(None)
        return answer == b"f"
    except OSError:
        server.close()
        return False


if __name__ == "__main__":
    main()
