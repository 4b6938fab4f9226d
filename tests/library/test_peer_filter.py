"""The peer filter (library/native/peer_filter.c): programs that it is loaded into accept members of the job only.

Strangers are processes of another user of this machine, so these tests need root.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from smdistributed.core import native

FILTER = native.PATH.with_name("_peer_filter.so")
STRANGER = 65534
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to act as another user")

CLIENT = """
import os, socket, sys
source, port, ending, ready, done = sys.argv[1:]
client = socket.socket()
source, _, own = source.partition(":")
client.bind((source, int(own or 0)))
client.connect((source, int(port)))
client.sendall(b"hello")
if ending == "half": client.shutdown(socket.SHUT_WR)
if ending == "reset":
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\\1\\0\\0\\0\\0\\0\\0\\0")
if ending in ("closed", "reset"): client.close()
os.write(int(ready), b"x")
os.read(int(done), 1)
"""

# Accepts one connection from each client, and prints what the server reads from it. A client has a user's number, what
# it does before it is accepted, and an address; `:last` after that is the port of the client before, which is free.
SERVER = f"""
import os, socket, sys
CLIENT = {CLIENT!r}
family, names = sys.argv[1], sys.argv[2:]
if family == "6":
    server = socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
else:
    server = socket.create_server(("", 0))
server.settimeout(20)
last = 0
for name in names:
    uid, ending, source = name.split(",")
    ready, done = os.pipe(), os.pipe()
    if os.fork() == 0:
        os.set_inheritable(ready[1], True), os.set_inheritable(done[0], True)
        source = source.replace("last", str(last))
        os.setuid(int(uid))  # a process of its own, which has not opened what its parent has
        words = [CLIENT, source, str(server.getsockname()[1]), ending, str(ready[1]), str(done[0])]
        os.execv("/usr/bin/python3", ["python3", "-c", *words])
    os.read(ready[0], 1)
    connection, address = server.accept()
    connection.settimeout(20)
    try: print(connection.recv(10).decode())
    except OSError as error: print(type(error).__name__)
    os.write(done[1], b"x")
    os.wait()
    last = address[1]
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\\1\\0\\0\\0\\0\\0\\0\\0")
    connection.close()
"""


def serve(family: str, *clients: str, **variables: str) -> tuple[list[str], str]:
    """Return what the server reads from each client, and its stderr."""
    environment = {**os.environ, "LD_PRELOAD": str(FILTER), **variables}
    command = [sys.executable, "-c", SERVER, family, *clients]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    return ended.stdout.splitlines(), ended.stderr


@pytest.mark.parametrize("family", ["4", "6"])
def test_a_process_of_the_same_user_is_read_and_another_users_is_not(family: str) -> None:
    ours, theirs = "0,open,127.0.0.1", f"{STRANGER},open,127.0.0.1"
    read, log = serve(family, ours, theirs, ours, theirs)
    assert read == ["hello", "", "hello", ""]
    assert log.count("refused a connection from 127.0.0.1") == 1  # a stranger cannot fill the log
    assert "Fix: " in log


@pytest.mark.parametrize("ending", ["half", "closed", "reset"])
def test_a_stranger_that_leaves_before_it_is_accepted_is_not_read(ending: str) -> None:
    """The kernel gives a socket without a process the uid 0, which is root's."""
    read, _ = serve("4", f"{STRANGER},{ending},127.0.0.1", "0,open,127.0.0.1")
    assert read[0] in ("", "ConnectionResetError")
    assert read[1] == "hello"


@pytest.fixture
def noted() -> Iterator[dict[str, str]]:
    """The variable that names a table of connections, as `train` makes it."""
    table = os.memfd_create("connections")
    os.ftruncate(table, 65536 * 8)
    yield {"SHOAL_CONNECTIONS": f"/proc/{os.getpid()}/fd/{table}"}
    os.close(table)


@pytest.mark.parametrize("family", ["4", "6"])
@pytest.mark.parametrize("ending", ["half", "closed"])
@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.9", "own"])
def test_a_member_that_leaves_before_it_is_accepted_is_read(
    family: str, ending: str, address: str, noted: dict[str, str]
) -> None:
    """As NCCL's ranks do when they tell the first one who they are; by the address of the host, or of loopback."""
    if address == "own":
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("192.0.2.1", 9))
            address = probe.getsockname()[0]
    ours, theirs = f"0,{ending},{address}", f"{STRANGER},{ending},{address}"
    read, log = serve(family, ours, theirs, ours, **noted)
    assert read == ["hello", "", "hello"], log


@pytest.mark.parametrize(("ending", "read"), [("open", "hello"), ("closed", "hello"), ("reset", "")])
def test_a_stranger_at_a_port_that_a_member_has_left_is_not_read(ending: str, read: str, noted: dict[str, str]) -> None:
    clients = (f"0,{ending},127.0.0.1", f"{STRANGER},closed,127.0.0.1:last")
    assert serve("4", *clients, **noted)[0] == [read, ""]
    assert serve("4", *clients, LD_PRELOAD="")[0][1] == "hello"


def test_without_the_filter_the_stranger_is_read() -> None:
    assert serve("4", f"{STRANGER},open,127.0.0.1", LD_PRELOAD="")[0] == ["hello"]


def test_a_user_accepts_root_and_itself_but_no_third_user() -> None:
    program = f"import os; os.setuid({STRANGER})\n" + SERVER.replace("os.setuid(int(uid))", "pass")
    environment = {**os.environ, "LD_PRELOAD": str(FILTER)}
    command = ["/usr/bin/python3", "-c", program, "4", "0,open,127.0.0.1"]
    assert subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60).stdout == "hello\n"


LISTENER = """
import os, socket, sys
server = socket.create_server(("127.0.0.1", 0))
pid = os.fork()
if pid == 0:
    os.setuid(int(sys.argv[1]))
    own = socket.create_server(("127.0.0.1", 0))
    print(own.getsockname()[1], flush=True)
    sys.stdin.read()
    os._exit(0)
os.waitpid(pid, 0)
"""


@pytest.mark.parametrize(("uid", "expected"), [(0, "connected"), (STRANGER, "ConnectionRefusedError")])
def test_another_user_cannot_stand_in_for_the_first_rank(uid: int, expected: str) -> None:
    with subprocess.Popen([sys.executable, "-c", LISTENER, str(uid)], stdin=-1, stdout=-1, text=True) as listener:
        assert listener.stdin
        assert listener.stdout
        port = listener.stdout.readline().strip()
        program = (
            "import socket\n"
            f"try: socket.create_connection(('127.0.0.1', {port}), 10); print('connected')\n"
            "except OSError as error: print(type(error).__name__)\n"
        )
        for master, result in ((port, expected), ("1", "connected")):
            environment = {**os.environ, "LD_PRELOAD": str(FILTER), "MASTER_PORT": master}
            ended = subprocess.run(
                [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60
            )
            assert ended.stdout.strip() == result
        listener.stdin.close()


ATTACKED = """
import os, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
if dist.get_rank() == 0: print("ready", flush=True)
total = torch.ones(1000)
while True:
    dist.all_reduce(total); total.fill_(1)
    flag = torch.tensor([float(os.path.exists(sys.argv[1]))])
    dist.broadcast(flag, 0)
    if flag.item(): break
dist.all_reduce(total)
assert total[0] == dist.get_world_size()
print("done", flush=True)
dist.barrier()
os._exit(0)  # the threads of gloo can abort a rank that ends
"""

NOISE = """
import os, socket, sys
"x".encode("idna")
os.setuid(65534)
ports = [int(port) for port in sys.argv[1:]]
received = 0
for number in range(150):
    for port in ports:
        try:
            client = socket.create_connection(("127.0.0.1", port), 5)
            client.sendall(b"\\0" * (1 + number * 7 % 97))
            if number % 3 == 0:
                client.settimeout(2)
                received += bool(client.recv(100))
            if number % 3 == 1:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\\1\\0\\0\\0\\0\\0\\0\\0")
            client.close()
        except OSError:
            pass
print(received)
"""


def _listening_ports(pids: list[int]) -> list[str]:
    """Return the TCP ports at which processes listen."""
    inodes = set()
    for pid in pids:
        for file in Path(f"/proc/{pid}/fd").iterdir():
            target = str(file.readlink())
            if target.startswith("socket:"):
                inodes.add(target[8:-1])
    rows = [
        line.split() for table in ("tcp", "tcp6") for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    return [str(int(row[1].rpartition(":")[2], 16)) for row in rows if row[3] == "0A" and row[9] in inodes]


def test_a_stranger_at_all_ports_neither_takes_part_in_a_job_of_torch_nor_ends_it(tmp_path: Path) -> None:
    program, end = tmp_path / "attacked.py", tmp_path / "end"
    program.write_text(ATTACKED)
    environment = {**os.environ, "LD_PRELOAD": str(FILTER), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", str(program), str(end)]
    with subprocess.Popen(command, env=environment, stdout=-1, text=True, start_new_session=True) as job:
        assert job.stdout
        assert job.stdout.readline() == "ready\n"
        children = [int(pid) for pid in Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()]
        ports = _listening_ports([job.pid, *children])
        assert len(ports) >= 2  # the store and gloo
        neighbour = subprocess.run(
            ["/usr/bin/python3", "-c", NOISE, *ports], capture_output=True, text=True, timeout=120
        )
        assert neighbour.stdout == "0\n"
        end.touch()
        assert job.stdout.read().count("done") == 2  # the two may share a line
    assert job.returncode == 0
