"""Programs for the containers: training scripts that fail, and programs that cause faults."""

from __future__ import annotations

# A script tells the test what it does, and when, by files: its output passes through what is under test.
_MARK = """\
import os, pathlib, signal, sys, time
RANK = int(os.environ.get("RANK", "0"))

def mark(event):
    path = pathlib.Path(os.environ["SM_MODEL_DIR"]).with_name("checkpoints") / f"{event}.{RANK}"
    path.with_name("." + path.name).write_text(repr(time.time()))
    path.with_name("." + path.name).rename(path)

"""


def script(text: str) -> str:
    """Return a training script that marks "up" first; its own lines may call mark(event)."""
    return f"{_MARK}mark('up')\n{text}"


TRAIN_FOR_LONG = script("time.sleep(300)\n")
TRAIN_A_LITTLE = script("time.sleep(2)\n")

# Talk for some seconds: a lost message would be waited for.
TRAIN_TOGETHER = {
    "process": script("time.sleep(9)\n"),
    "MPI": script(
        "from mpi4py import MPI\n"
        "while MPI.COMM_WORLD.bcast(time.time() < pathlib.Path('/opt/ml/checkpoints/up.0').stat().st_mtime + 9"
        " if RANK == 0 else None):\n    time.sleep(0.1)\n"
    ),
}

# In a host's network namespace, with the right to change it: cut the wire, and mend it some seconds later (0: never).
CUT = """\
import fcntl, socket, struct, sys, time

def wire(up):
    with socket.socket() as any_socket:
        flags = struct.unpack("16sh", fcntl.ioctl(any_socket, 0x8913, struct.pack("16sh", b"eth0", 0)))[1]
        fcntl.ioctl(any_socket, 0x8914, struct.pack("16sh", b"eth0", flags | 1 if up else flags & ~1))

print(time.time(), flush=True)
wire(up=False)
if float(sys.argv[1]):
    time.sleep(float(sys.argv[1]))
    wire(up=True)
"""

# There too: send all packets for a host to a network card that nobody has.
MISLEAD = """\
import fcntl, socket, struct, sys, time
address = struct.pack("hH4s8x", socket.AF_INET, 0, socket.inet_aton(socket.gethostbyname(sys.argv[1])))
nobody = struct.pack("h6s8x", 1, bytes.fromhex("02deaddeaded"))
print(time.time(), flush=True)
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
    fcntl.ioctl(any_socket, 0x8955, address + nobody + struct.pack("i16s16s", 2 | 4, b"", b"eth0"))
"""

# Signal the processes of a program, but for PID 1; print when.
SIGNAL = """\
import os, pathlib, sys, time
for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
    words, pid = path.read_bytes().decode().split("\\0"), int(path.parent.name)
    if pid not in (1, os.getpid()) and any(word.endswith(sys.argv[1]) for word in words[:3]):
        print(time.time(), flush=True)
        os.kill(pid, int(sys.argv[2]))
"""

# A name server that asks Docker's, and takes its time.
SLOW_DNS = """\
import socket, sys, threading, time
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind(("", 53))

def answer(question, who):
    time.sleep(float(sys.argv[1]))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as upstream:
        upstream.sendto(question, ("127.0.0.11", 53))
        server.sendto(upstream.recv(4096), who)

while True:
    threading.Thread(target=answer, args=server.recvfrom(4096), daemon=True).start()
"""

# The resources that `train` uses over a number of seconds: bytes of memory at most, CPU seconds.
USE = """\
import json, os, pathlib, re, sys, time
(train,) = (
    path.parent
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline")
    if path.parent.name != "1" and path.read_bytes().split(b"\\0")[1:2] == [b"/opt/venv/bin/train"]
)

def cpu():
    fields = (train / "stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

began = cpu()
time.sleep(float(sys.argv[1]))
used = cpu() - began
print(json.dumps([int(re.search(r"VmHWM:\\s+(\\d+)", (train / "status").read_text())[1]) << 10, used]))
"""

# libfaketime 0.9.10 breaks clock_nanosleep, by which Python 3.11 sleeps: a sitecustomize.py for hosts with it.
SLEEP = "import select, time\ntime.sleep = lambda seconds: select.select([], [], [], seconds)\n"
