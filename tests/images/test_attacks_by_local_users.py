"""Attacks of another user of this machine on a job that runs without Docker. They need root, to act as that user."""

from __future__ import annotations

import getpass
import json
import os
import socket
import stat
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from shoal.errors import UsageError
from shoal.jobs import checkpoints
from shoal.jobs.checkpoints import MARK, copy_tree, open_directory
from shoal.jobs.job import LOCAL, JobRequest
from shoal.jobs.store import JobRecord, open_job
from shoal.limits import MOST_DEPTH
from smdistributed.core import native

FILTER = native.PATH.with_name("_peer_filter.so")
STRANGER = 65534
SHOAL = Path(sys.executable).with_name("shoal")
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to act as another user")

PRELUDE = f"""
import os, socket, sys, time
"x".encode("idna")  # before setuid: another user may not be able to read Python's files
with socket.create_server(("127.0.0.1", 0)) as probe: port = probe.getsockname()[1]
os.environ["MASTER_PORT"] = str(port)
ready, is_ready = os.pipe()
def as_stranger(attack):
    pid = os.fork()
    if pid == 0:
        os.setuid({STRANGER})
        try: attack()
        finally: os._exit(0)
    os.read(ready, 1)
    return pid
def rank_hears(address, seconds=1):
    try:
        with socket.create_connection((address, port), 5) as connection:
            connection.settimeout(seconds)
            return connection.recv(20)
    except OSError: return b""
"""

# The first rank's own socket at 0.0.0.0 must not vouch for a stranger's at the more specific address.
BESIDE = """
def attack():
    server = socket.socket(socket.AF_INET6)
    server.bind(("::1", port))
    server.listen(5)
    os.write(is_ready, b"x")
    while True: server.accept()[0].sendall(b"stranger")
pid = as_stranger(attack)
own = socket.create_server(("0.0.0.0", port))
print(rank_hears("::1"))
os.kill(pid, 9)
"""

# A rank looks who listens before it connects. The stranger listens only for moments.
BETWEEN = """
def attack():
    os.write(is_ready, b"x")
    kept = []
    def wait():
        until = time.perf_counter() + 60e-6
        while time.perf_counter() < until: pass
    while os.getppid() != 1:
        with socket.socket() as server:
            server.setblocking(False)
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                server.bind(("127.0.0.1", port))
                server.listen(5)
                wait()
                connection, _ = server.accept()
                connection.sendall(b"stranger")
                kept.append(connection)
            except OSError: pass
        wait()
pid = as_stranger(attack)
until = time.monotonic() + 4
received = b""
while time.monotonic() < until and not received: received = rank_hears("127.0.0.1", 0.3)
print(received)
os.kill(pid, 9)
"""

# Connections of others make the kernel's table long, but not the time that a rank needs to accept one.
MANY = """
def attack():
    server, kept = socket.create_server(("127.0.0.1", 0), backlog=500), []
    for _ in range(450): kept.append(socket.create_connection(server.getsockname()))
    os.write(is_ready, b"x")
    time.sleep(60)
server = socket.create_server(("127.0.0.1", 0), backlog=64)
def measure():
    times = []
    for _ in range(31):
        with socket.create_connection(server.getsockname()):
            began = time.perf_counter()
            server.accept()[0].close()
            times.append(time.perf_counter() - began)
    return sorted(times)[15]
few = measure()
pids = [as_stranger(attack) for _ in range(10)]
many = measure()
for pid in pids: os.kill(pid, 9)
print(b"" if many < 0.01 else (few, many))  # the table of 9,000 sockets takes 30 ms to read
"""


def run(attack: str, **variables: str) -> str:
    """Return the output of an attack. The attacked process has the filter."""
    environment = {**os.environ, "LD_PRELOAD": str(FILTER), **variables}
    command = [sys.executable, "-c", PRELUDE + attack]
    return subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, text=True, timeout=60, check=True
    ).stdout.strip()


@pytest.mark.parametrize("attack", [BESIDE, BETWEEN, MANY], ids=["beside", "between", "many"])
def test_a_stranger_neither_stands_in_for_the_first_rank_nor_delays_it(attack: str) -> None:
    assert run(attack) == "b''"


def test_without_the_filter_the_stranger_stands_in_for_the_first_rank() -> None:
    assert run(BESIDE, LD_PRELOAD="") == "b'stranger'"


MULTIPATH = 262  # the number of MPTCP, whose sockets the kernel lists as those of TCP
VISIT = f"""
server = socket.create_server(("127.0.0.1", 0))
def attack():
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, {MULTIPATH}) as client:
        client.connect(server.getsockname())
        client.sendall(b"stranger")
        os.write(is_ready, b"x")
        client.recv(1)
as_stranger(attack)
connection, _ = server.accept()
connection.settimeout(10)
print(connection.recv(20))
"""


def _has_multipath() -> bool:
    try:
        socket.socket(socket.AF_INET, socket.SOCK_STREAM, MULTIPATH).close()
    except OSError:
        return False
    return True


@pytest.mark.skipif(not _has_multipath(), reason="needs a kernel with MPTCP")
def test_another_kind_of_tcp_is_refused_too() -> None:
    assert run(VISIT) == "b''"


# As torch.compile does with its cache, from which it loads programs.
CACHED = """
import getpass, os, tempfile
cache = os.path.join(tempfile.gettempdir(), "torchinductor_" + getpass.getuser())
os.makedirs(cache, exist_ok=True)
found, directory = os.stat(cache), os.stat(tempfile.gettempdir())
print("the cache is of", found.st_uid, "with", os.listdir(cache), "in", oct(directory.st_mode & 0o7777), flush=True)
"""


def test_directories_that_a_stranger_makes_with_known_names_are_not_the_jobs(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(CACHED)
    with tempfile.TemporaryDirectory() as shared:
        Path(shared).chmod(0o1777)
        theirs = f"mkdir -m 777 {shared}/torchinductor_{getpass.getuser()} && cd $_ && touch program.so"
        subprocess.run(["bash", "-c", theirs], user=STRANGER, group=STRANGER, extra_groups=[], cwd="/", check=True)
        command: list[str | Path] = [
            SHOAL,
            "run",
            "pytorch",
            tmp_path / "train.py",
            "--engine",
            "none",
            "--output",
            tmp_path / "jobs",
        ]
        environment = {**os.environ, "TMPDIR": shared}
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        left = [path.name for path in Path(shared).iterdir()]
    assert "the cache is of 0 with [] in 0o700" in ended.stdout, ended
    assert left == [f"torchinductor_{getpass.getuser()}"]


@pytest.mark.parametrize("link", [False, True], ids=["copied", "linked"])
def test_a_setuid_program_of_a_stranger_in_a_checkpoint_keeps_its_owner(tmp_path: Path, link: bool) -> None:
    source, target = tmp_path / "from", tmp_path / "to"
    source.mkdir()
    target.mkdir()
    program = source / "program"
    program.write_bytes(b"#!")
    os.chown(program, STRANGER, STRANGER)
    program.chmod(0o6755)
    copy_tree(source, target, link=link)
    copy = (target / "program").stat()
    assert copy.st_uid == STRANGER or copy.st_mode & 0o7777 == 0o755


MARKS: dict[str, Callable[[Path], object]] = {
    "nested": lambda mark: mark.write_text("[" * 100_000),
    "fifo": os.mkfifo,
    "link": lambda mark: mark.symlink_to("/etc/passwd"),
    "endless": lambda mark: mark.symlink_to("/dev/zero"),
    "directory": lambda mark: mark.mkdir(),
    "surrogates": lambda mark: mark.write_bytes(b"\xff\xfe"),
}


@pytest.mark.parametrize("make", MARKS.values(), ids=MARKS)
def test_a_hostile_mark_in_a_checkpoint_is_an_error_at_once(tmp_path: Path, make: Callable[[Path], object]) -> None:
    directory = tmp_path / "checkpoints"
    directory.mkdir()
    make(directory / MARK)
    with (
        pytest.raises(UsageError, match=r"does not name a job.*Fix: "),
        open_directory(directory, "job", "--checkpoints"),
    ):
        pass


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


ODD_FILES: dict[str, Callable[[Path], object]] = {
    "fifo": os.mkfifo,
    "socket": make_socket,
    "endless": lambda path: os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 5)),
    "name": lambda path: Path(os.fsdecode(os.fsencode(path) + b"\xff\n\x1b]0;x\x07")).mkdir(),
}


@pytest.mark.parametrize("name", [MARK, f"{MARK}.new"])
def test_a_directory_in_the_place_of_the_mark_keeps_no_checkpoints_from_being_collected(
    tmp_path: Path, name: str
) -> None:
    with open_directory(tmp_path / "checkpoints", "job", "--checkpoints") as opened, opened.replace() as scratch:
        (scratch / "checkpoints" / name / "sub").mkdir(parents=True)
        (scratch / "checkpoints" / "step").write_text("1")
    assert (tmp_path / "checkpoints" / "step").read_text() == "1"
    assert json.loads((tmp_path / "checkpoints" / MARK).read_text()) == {"job": "job"}


@pytest.mark.parametrize("make", ODD_FILES.values(), ids=ODD_FILES)
def test_odd_files_among_checkpoints_end_no_job(tmp_path: Path, make: Callable[[Path], object]) -> None:
    directory, copied = tmp_path / "checkpoints", tmp_path / "copy"
    directory.mkdir()
    copied.mkdir()
    (directory / "model.pt").write_text("weights")
    make(directory / "odd")
    with open_directory(directory, "job", "--checkpoints") as opened:
        opened.copy_to(copied)
        with opened.replace() as scratch:
            copy_tree(directory, scratch / "checkpoints")
    assert (copied / "model.pt").read_text() == (directory / "model.pt").read_text() == "weights"
    assert not (copied / "odd").exists()


def test_checkpoints_in_too_many_directories_are_left_out(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A program can make them one in the other without a limit. Python's recursion has one."""
    directory, copied = tmp_path / "checkpoints", tmp_path / "copy"
    copied.mkdir()
    directory.mkdir()
    code = "import os\nfor _ in range(1500): os.mkdir('d'), os.chdir('d')"
    subprocess.run([sys.executable, "-c", code], cwd=directory, check=True)
    (directory / "model.pt").write_text("weights")
    with open_directory(directory, "job", "--checkpoints") as opened, tempfile.TemporaryFile() as packed:
        opened.copy_to(copied)
        opened.pack("checkpoints", packed, (0, 0))
        with tarfile.open(fileobj=packed) as found:
            assert max(name.count("/") for name in found.getnames()) == MOST_DEPTH
    assert (copied / "model.pt").exists()
    assert capfd.readouterr().err.count("in more than 100 others are not copied") == 2
    checkpoints._add_permissions(directory)
    subprocess.run(["rm", "-r", str(directory)], check=True)


IN_THE_WAY: dict[str, tuple[str, Callable[[Path], object]]] = {
    "lock-fifo": (".checkpoints.shoal-lock", os.mkfifo),
    "scratch-link": (".checkpoints.shoal-new", lambda path: path.symlink_to("/tmp")),
    "scratch-file": (".checkpoints.shoal-new", lambda path: path.write_text("")),
}


@pytest.mark.parametrize("case", IN_THE_WAY.values(), ids=IN_THE_WAY)
def test_files_in_the_way_of_checkpoints_are_an_error_before_the_training(
    tmp_path: Path, case: tuple[str, Callable[[Path], object]]
) -> None:
    name, make = case
    make(tmp_path / name)
    with (
        pytest.raises((UsageError, PermissionError), match=rf"{name}.*Fix: |Fix: .*{name}"),
        open_directory(tmp_path / "checkpoints", "job", "--checkpoints"),
    ):
        pass


def give_away(path: Path) -> None:
    os.chown(path, STRANGER, STRANGER, follow_symlinks=False)


def make_theirs(path: Path) -> None:
    path.mkdir()
    give_away(path)


def make_open(path: Path) -> None:
    path.mkdir()
    path.chmod(0o777)


def link_theirs(path: Path) -> None:
    make_theirs(path.with_name("theirs"))
    path.symlink_to(path.with_name("theirs"))


OUTPUTS: dict[str, Callable[[Path], object]] = {
    "theirs": make_theirs,
    "open": make_open,
    "link": link_theirs,
}


@pytest.mark.parametrize("make", OUTPUTS.values(), ids=OUTPUTS)
def test_a_job_does_not_start_where_a_stranger_can_replace_its_code(
    tmp_path: Path, make: Callable[[Path], object]
) -> None:
    """A stranger who can rename the directory of a job puts another script in its place before the hosts start."""
    make(tmp_path / "jobs")
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").touch()
    request = JobRequest(source=tmp_path / "code", entry_point="train.py", output=tmp_path / "jobs")
    with (
        pytest.raises(UsageError, match=r"could replace the files of the job.*Fix: .*shoal trust"),
        open_job(JobRecord(replace(request, image="image:1", engine=LOCAL)), None, "digits"),
    ):
        pass
    assert not (tmp_path / "jobs" / "digits").exists()


@pytest.mark.parametrize("make", OUTPUTS.values(), ids=OUTPUTS)
def test_checkpoints_are_not_taken_from_a_directory_in_which_a_stranger_can_put_them(
    tmp_path: Path, make: Callable[[Path], object]
) -> None:
    make(tmp_path / "checkpoints")
    with (
        pytest.raises(UsageError, match=r"decides what the job continues from\. Fix: .*shoal trust"),
        open_directory(tmp_path / "checkpoints", "job", "--checkpoints"),
    ):
        pass


@pytest.mark.parametrize("make", [make_theirs, make_open])
def test_checkpoints_are_not_collected_where_a_stranger_can_replace_a_directory(
    tmp_path: Path, make: Callable[[Path], object]
) -> None:
    """They would put a link in the place of the scratch directory, and the job's files would go elsewhere."""
    make(tmp_path / "shared")
    with (
        pytest.raises(UsageError, match=r"shared.*Fix: .*shoal trust"),
        open_directory(tmp_path / "shared" / "checkpoints", "job", "--checkpoints"),
    ):
        pass


@pytest.mark.parametrize("mode", [0o700, 0o750])
def test_checkpoints_can_be_read_by_nobody_who_could_not_read_their_directory(tmp_path: Path, mode: int) -> None:
    directory = tmp_path / "checkpoints"
    directory.mkdir()
    directory.chmod(mode)
    with open_directory(directory, "job", "--checkpoints") as opened, opened.replace() as scratch:
        (scratch / "checkpoints").mkdir(mode=0o755)
        assert scratch.stat().st_mode & 0o777 == 0o700
    assert directory.stat().st_mode & 0o777 == mode


def link_to_documents(jobs: Path, documents: Path) -> None:
    jobs.symlink_to(documents)


def write_odd_entries(jobs: Path, documents: Path) -> None:
    jobs.mkdir()
    (jobs / "directory").mkdir()
    (jobs / "file").touch()
    os.mkfifo(jobs / "pipe")
    (jobs / "link").symlink_to(documents)


@pytest.mark.parametrize("make", [link_to_documents, write_odd_entries])
@pytest.mark.parametrize("is_theirs", [True, False])
def test_a_list_of_jobs_that_was_made_before_loses_no_file(
    tmp_path: Path, make: Callable[[Path, Path], object], is_theirs: bool
) -> None:
    """`shoal ps` removes links to jobs that are gone. A link to other files has them removed in their place."""
    documents, lists = tmp_path / "documents", tmp_path / "state" / "shoal" / "jobs"
    documents.mkdir()
    lists.mkdir(parents=True)
    (documents / "letter").touch()
    make(lists / socket.gethostname(), documents)
    if is_theirs:
        give_away(lists / socket.gethostname())
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")}
    for words in (["ps", "--all"], ["ps", "--json"]):
        ended = subprocess.run([SHOAL, *words], env=environment, capture_output=True, text=True, timeout=60)
        assert ended.returncode == 0, ended
    assert (documents / "letter").exists()
    if make is write_odd_entries:
        assert len(list((lists / socket.gethostname()).iterdir())) == 4


SHARED_MEMORY = """
import os
from mpi4py import MPI
MPI.COMM_WORLD.allreduce(1)
for line in open("/proc/self/maps"):
    if "_segment." in line:
        directory = os.path.dirname(line.split()[-1])
        print("mapped in", oct(os.stat(directory).st_mode & 0o7777), directory)
for name in os.listdir("/proc/self/fd"):
    try: print("has open", os.readlink("/proc/self/fd/" + name))
    except OSError: pass
with open("/proc/sysvipc/shm") as file: print("SysV segments:", len(file.readlines()) - 1)
MPI.COMM_WORLD.barrier()
"""


@pytest.mark.mpi
def test_the_shared_memory_of_mpi_is_in_no_file_that_a_stranger_can_make_first(tmp_path: Path) -> None:
    """Names of Open MPI's files are of the host, the user and 16 bits of a process number: a stranger makes all."""
    (tmp_path / "train.py").write_text(SHARED_MEMORY)
    command: list[str | Path] = [SHOAL, "run", "pytorch", tmp_path / "train.py", "--engine", "none", "--hosts", "2"]
    ended = subprocess.run(
        [*command, "--output", tmp_path / "jobs"], capture_output=True, text=True, timeout=100, check=True
    )
    found = {line.partition("mapped in ")[2] for line in ended.stdout.splitlines() if "mapped in" in line}
    assert len(found) == 1, ended
    mode, directory = found.pop().split()
    assert mode == "0o700"
    assert not Path(directory).exists()
    files = {line.partition("has open ")[2] for line in ended.stdout.splitlines() if "has open /" in line}
    assert [name for name in files if str(tmp_path) in name] == []  # no lock or record of the job
    assert "SysV segments: 0" in ended.stdout


# The first rank listens at MASTER_PORT, and is killed once. The job has a network of its own. A stranger has the
# default port there, and fills all others with connections, also between the two starts.
ELASTIC = """
import os, signal, socket, time
if os.environ["RANK"] == "0":
    with socket.create_server(("", int(os.environ["MASTER_PORT"]))): time.sleep(0.5)
    if os.environ["SHOAL_RESTART"] == "0": os.kill(os.getpid(), signal.SIGKILL)
    print("rank 0 had a port", flush=True)
"""
TAKE_DEFAULT_PORT = f"""
import os, select, socket, subprocess, sys
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
"x".encode("idna")  # before setuid: another user may not be able to read Python's files
ready, done = os.pipe(), os.pipe()
if os.fork() == 0:
    os.setuid({STRANGER})
    server, held = socket.create_server(("127.0.0.1", 7777)), []
    os.write(ready[1], b"x")
    while not select.select([done[0]], [], [], 0)[0]:
        for row in map(str.split, [*open("/proc/net/tcp"), *open("/proc/net/tcp6")]):
            for address in ("127.0.0.1", "127.0.0.2") if row[3] == "0A" else ():
                try: held.append(socket.create_connection((address, int(row[1].rpartition(":")[2], 16)), 0.1))
                except OSError: pass
        del held[:-500]
    os.write(1, b"a stranger has made connections\\n" if held else b"")
    os._exit(0)
os.read(ready[0], 1)
code = subprocess.run(sys.argv[1:]).returncode
os.write(done[1], b"x")
os.wait()
sys.exit(code)
"""


@pytest.mark.skipif(
    subprocess.run(["unshare", "-n", "true"], capture_output=True).returncode != 0, reason="needs network namespaces"
)
def test_a_stranger_at_the_default_port_and_all_others_ends_no_job_with_a_range_of_hosts(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(ELASTIC)
    options = ["--hosts", "1:2", "--max-restarts", "1", "--engine", "none", "--output", str(tmp_path / "jobs")]
    job = [str(SHOAL), "run", "pytorch", str(tmp_path / "train.py"), *options]
    command = ["unshare", "-n", sys.executable, "-c", TAKE_DEFAULT_PORT, *job]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended
    assert "rank 0 had a port" in ended.stdout
    assert "a stranger has made connections" in ended.stdout
