"""mpirun's launch agent: it runs this where it would run ssh, with a host and a command.

Asks the first host's `train` over its private socket to have the command run on that host, and ends as it ends. It
runs alone (`python -I -S rsh.py`), so it imports nothing of the package.
"""

from __future__ import annotations

import json
import os
import socket
import sys


def main() -> int:
    """Return the daemon's exit code, 255 (as ssh) when the host or the first host's `train` is gone."""
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
