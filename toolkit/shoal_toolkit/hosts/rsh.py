"""Replaces ssh for mpirun: asks `train` to run a command on another host, and ends with its exit code.

mpirun runs this program with a host and a command. It sends both to `train` over a private socket. It runs with
`python -I -S`, so it can't import the package.
"""

from __future__ import annotations

import json
import os
import socket
import sys


def main() -> int:
    """Sends the request, and waits until the command has ended on the other host.

    Returns the exit code of the command; 255, like ssh, if `train` closes the socket without one. Raises OSError if
    `train` is gone already.
    """
    host, command = sys.argv[1], " ".join(sys.argv[2:])
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as train:
        train.connect(os.path.join(os.environ["SHOAL_RUN_DIR"], "rsh.sock"))
        train.sendall(json.dumps({"host": host, "command": command}).encode() + b"\n")
        answer = b""
        while chunk := train.recv(64):
            answer += chunk
    return int(answer or b"255")


if __name__ == "__main__":
    sys.exit(main())
