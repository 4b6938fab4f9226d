"""Writes to a file of /record how it was started: the script of the jobs that are compared.

A shell script calls it with its own `$0 $@`.
"""

import json
import os
import sys
import time
from pathlib import Path


def command_lines(pid: int) -> list[list[str]]:
    """Return the command line of a process and of those above it, the nearest first."""
    lines = []
    while pid:
        process = Path("/proc", str(pid))
        lines.append((process / "cmdline").read_text(errors="surrogateescape").split("\0")[:-1])
        pid = int((process / "stat").read_text(errors="surrogateescape").rpartition(")")[2].split()[1])
    return lines


facts = {
    "argv": sys.argv[1:] if sys.argv[0] == "/recorder/record.py" else sys.argv,
    "cwd": str(Path.cwd()),
    "interpreter": sys.executable,
    "environ": dict(os.environ),
    "parents": command_lines(os.getppid()),
}
with Path(f"/record/{os.getpid()}.json").open("x", encoding="utf-8") as file:
    json.dump(facts, file)
time.sleep(float(os.environ.get("RECORD_SECONDS", "0")))
