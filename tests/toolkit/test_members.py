"""SHOAL_MEMBERS_ONLY=1: the ranks accept connections from the job's hosts only."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from shoal_toolkit.job.peer_filter import PEERS, build_connection_variables
from smdistributed.core import native

from .conftest import Run, Tree
from .netns import UNAVAILABLE, running, stranger, two_hosts
from .test_plan import MACHINE, planned

needs_namespaces = pytest.mark.skipif(bool(UNAVAILABLE), reason=UNAVAILABLE)

# Each host listens, and prints what it reads from the first two visitors. The second host visits the first at last.
SCRIPT = """
import os, pathlib, socket, time
first = os.environ["SM_CURRENT_HOST"] == "algo-1"
if first:
    server = socket.create_server(("", 7000))
    pathlib.Path(os.environ["SM_MODEL_DIR"], "listens").touch()
    for _ in range(2):
        connection, address = server.accept()
        print("read", connection.recv(100), "from", address[0], flush=True)
        connection.close()
        pathlib.Path(os.environ["SM_MODEL_DIR"], "visited").touch()
else:
    go = pathlib.Path(os.environ["SM_MODEL_DIR"], "go")
    while not go.exists():
        time.sleep(0.01)
    socket.create_connection(("algo-1", 7000)).sendall(b"member")
"""
VISIT = (
    "import socket; s = socket.create_connection(('algo-1', 7000), 20, ('{0}', 0)); s.sendall(b'stranger'); s.recv(1)"
)


def await_file(path: Path) -> None:
    until = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < until, path
        time.sleep(0.01)


@needs_namespaces
@pytest.mark.parametrize(("members_only", "expected"), [("1", "b''"), ("0", "b'stranger'")])
def test_hosts_of_the_job_are_read_and_another_address_is_not(tmp_path: Path, members_only: str, expected: str) -> None:
    with two_hosts(tmp_path) as hosts, stranger(hosts[1]) as address:
        for host in hosts:
            host.tree.script(SCRIPT)
            host.tree.hyperparameters(sagemaker_pytorch_ddp_enabled=False)
        processes = [host.start(SHOAL_MEMBERS_ONLY=members_only) for host in hosts]
        with running(*processes):
            model = [host.tree.base / "model" for host in hosts]
            await_file(model[0] / "listens")
            subprocess.run(hosts[1].command("/usr/bin/python3", "-c", VISIT.format(address)), check=True, timeout=60)
            await_file(model[0] / "visited")
            (model[1] / "go").touch()
            first, second = [host.finished(process) for host, process in zip(hosts, processes)]
    assert (first.code, second.code) == (0, 0), (first, second)
    assert f"read {expected} from {address}" in first.out
    assert "read b'member' from" in first.out


SERVER = """
import socket
server = socket.create_server(("", 7000))
print("listens", flush=True)
for _ in range(10):
    server.accept()[0].close()
"""
# Prints when the first and the last of ten visits have ended.
VISITS = """
import socket, time
began = time.monotonic()
for visit in [socket.create_connection(("algo-1", 7000), 20, ("{0}", 0)) for _ in range(10)]:
    visit.recv(1)
    print(time.monotonic() - began)
"""


@needs_namespaces
def test_a_stranger_that_connects_often_is_looked_up_once(tmp_path: Path) -> None:
    """While a host is missing, the look for its name takes seconds, as here the look for many."""
    variables = f"LD_PRELOAD={native.PATH.with_name('_peer_filter.so')}", "SHOAL_PEERS=" + "1 " * 60_000
    with two_hosts(tmp_path) as hosts, stranger(hosts[1]) as address:
        command = hosts[0].command("env", *variables, "/usr/bin/python3", "-c", SERVER)
        with subprocess.Popen(command, stdout=-1, text=True) as server:
            assert server.stdout
            assert server.stdout.readline() == "listens\n"
            visits = hosts[1].command("/usr/bin/python3", "-c", VISITS.format(address))
            ended = subprocess.run(visits, check=True, timeout=60, capture_output=True, text=True)
    first, *_, last = map(float, ended.stdout.split())
    assert last < 3 * first


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to act as another user")
def test_other_users_cannot_open_the_table_of_connections() -> None:
    path = build_connection_variables({PEERS: ""})["SHOAL_CONNECTIONS"]
    command = ["/usr/bin/python3", "-c", f"open({path!r}, 'r+b'); print('opened')"]
    assert subprocess.run(command, check=False, capture_output=True, text=True).stdout == "opened\n"
    ended = subprocess.run(command, user=65534, group=65534, extra_groups=[], capture_output=True, check=False)
    assert b"PermissionError" in ended.stderr


FILTERED = MACHINE._replace(peer_filter="/site/_peer_filter.so")


def test_the_filter_comes_before_what_the_user_preloads(tree: Tree) -> None:
    tree.hosts("algo-2", "algo-1", "algo-2", "algo-3")
    plan = planned(tree, FILTERED, SHOAL_MEMBERS_ONLY="1", LD_PRELOAD="/lib/jemalloc.so")
    assert plan.env["LD_PRELOAD"] == "/site/_peer_filter.so:/lib/jemalloc.so"
    assert plan.env["SHOAL_PEERS"] == "algo-1 algo-3"
    assert not [note for note in plan.notes if "password" in note]


def test_nothing_is_preloaded_unless_it_is_asked_for(tree: Tree) -> None:
    assert "LD_PRELOAD" not in planned(tree, FILTERED, SHOAL_MEMBERS_ONLY="0").env
    assert "LD_PRELOAD" not in planned(tree, FILTERED).env


def test_a_job_whose_ports_are_open_has_one_note(tree: Tree) -> None:
    tree.hosts("algo-1", "algo-1", "algo-2")
    notes = planned(tree, FILTERED).notes
    assert len([note for note in notes if "ask for no password" in note and "SHOAL_MEMBERS_ONLY=1" in note]) == 1


def test_one_process_on_one_host_has_no_note(tree: Tree) -> None:
    assert not [note for note in planned(tree, FILTERED).notes if "password" in note]


def test_an_image_without_the_filter_has_a_note(tree: Tree) -> None:
    notes = planned(tree, MACHINE, SHOAL_MEMBERS_ONLY="1").notes
    assert [note for note in notes if note.startswith("SHOAL_MEMBERS_ONLY=1 has no effect") and "Fix: " in note]


@pytest.mark.parametrize("name", ["my environment", "a:b"])
def test_a_filter_that_no_program_can_preload_has_a_note(tree: Tree, name: str) -> None:
    """The loader splits LD_PRELOAD at spaces and colons, and starts programs without the filter."""
    plan = planned(tree, MACHINE._replace(peer_filter=f"/{name}/_peer_filter.so"), SHOAL_MEMBERS_ONLY="1")
    assert "LD_PRELOAD" not in plan.env
    assert [note for note in plan.notes if f"/{name}/" in note and "Fix: " in note]


def test_a_wrong_value_is_an_error(tree: Tree, run: Run) -> None:
    tree.script("print('trained')")
    ended = run(SHOAL_MEMBERS_ONLY="yes")
    assert ended.code != 0
    assert "SHOAL_MEMBERS_ONLY is 'yes'; it must be a whole number from 0 to 1" in ended.err
