"""`shoal run --engine none`, with the real `train` and `mpirun` of this environment."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from shoal.matrix.project import Project
from shoal.report.job_report import read_report

SHOAL = Path(sys.executable).with_name("shoal")
SCRIPT = """\
import json, os, pathlib, sys
from mpi4py import MPI
ranks = MPI.COMM_WORLD.gather(int(os.environ["RANK"]))
if ranks is not None:
    pathlib.Path(os.environ["SM_MODEL_DIR"], "model.txt").write_text("weights")
    data = pathlib.Path(os.environ["SM_CHANNEL_TRAINING"], "data.txt").read_text()
    print("ranks", ranks, data, flush=True)
    print("step 1 loss 0.25 acc nan", flush=True)
MPI.COMM_WORLD.barrier()  # the first rank that exits 42 ends the others
sys.exit(int(os.environ["SM_HP_CODE"]))
"""


@pytest.mark.mpi
@pytest.mark.parametrize(("code", "manner"), [(0, []), (42, ["--json"])])
def test_two_hosts_become_one_with_all_ranks(project: Project, tmp_path: Path, code: int, manner: list[str]) -> None:
    source, channel = tmp_path / "code", tmp_path / "data"
    source.mkdir()
    channel.mkdir()
    (source / "train.py").write_text(SCRIPT)
    (channel / "data.txt").write_text("seen")
    options = ["--engine", "none", "--hosts", "2", "--procs-per-host", "2", "--hyperparameter", f"code={code}"]
    paths: list[str | Path] = [
        "--source",
        source,
        "--entry-point",
        "train.py",
        "--channel",
        f"training={channel}",
        "--output",
        tmp_path,
    ]
    env = {**os.environ, "DOCKER_HOST": "unix:///nonexistent/docker.sock"}
    command: list[str | Path] = [SHOAL, "run", "pytorch", *options, *manner, *paths]
    result = subprocess.run(command, cwd=project.root, env=env, capture_output=True, text=True, check=False)
    assert result.returncode == code, result.stdout + result.stderr
    output = result.stderr if manner else result.stdout
    assert "ranks [0, 1, 2, 3] seen" in output
    assert "2 hosts × 2 ranks run as 1 host × 4 ranks" in output
    (directory,) = tmp_path.glob("code-*")
    assert output.splitlines()[-1] == f"report: {directory / 'report.html'}"
    report = read_report(directory)
    assert (directory / "report.html").stat().st_mode & 0o777 == 0o600
    assert [(curve.name, [*curve.xs], [*curve.marks]) for curve in report.metrics] == [
        ("acc", [], [(report.metrics[0].marks[0][0], 1, "nan")]),
        ("loss", [1], []),
    ]
    assert (report.exit_code, report.settings["hyperparameters"]) == (code, {"code": str(code)})
    assert [line.rank for line in report.log if line.text == "ranks [0, 1, 2, 3] seen"] == [0]
    if manner:
        document = json.loads(result.stdout)
        assert (document["metrics"], document["not_finite"]) == ({"loss": 0.25}, {"acc": "nan"})
        assert (document["exit_code"], document["directory"]) == (code, str(directory))
        assert document["archives"]["model.tar.gz"] == str(directory / "model.tar.gz")
        assert (document["launch"]["ranks"], document["build_seconds"]) == (4, None)
        assert "42" in document["messages"]["algo-1"]
    with tarfile.open(directory / "model.tar.gz") as archive:
        assert archive.getnames() == ["model.txt"]
    tree = directory / "algo-1"
    assert json.loads((tree / "output" / "job.json").read_text())["exit_code"] == code
    assert (tree / "output" / "success").exists() == (code == 0)


def test_arguments_reach_a_shell_script_in_order_and_unchanged(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "show.sh").write_text('for word; do echo "<$word>"; done\n')
    words = ["--epochs", "3", "--explain", "data", "", "a  b", "$HOME", "--", '{"a": 1}']
    command = [str(SHOAL), "run", "any:1", "code/show.sh", "--local", "--hyperparameter", "seed=7", "--", *words]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    shown = [line for line in result.stdout.splitlines() if line.startswith("<")]
    assert shown == [f"<{word}>" for word in ["--seed", "7", *words]]


SAVING = """\
import os, pathlib, signal, sys, time
saved = pathlib.Path(os.environ["SAGEMAKER_BASE_DIR"], "checkpoints", "saved")
if saved.exists():
    sys.exit()
signal.signal(signal.SIGTERM, lambda *_: sys.exit(saved.write_text("x")))
print("started", flush=True)
time.sleep(600)
"""


def test_interrupted_job_continues(project: Project, tmp_path: Path) -> None:
    source = tmp_path / "code"
    source.mkdir()
    (source / "train.py").write_text(SAVING)
    command: list[str | Path] = [SHOAL, "run", "pytorch", "--engine", "none", "--output", tmp_path / "jobs"]
    command += ["--source", source, "--entry-point", "train.py"]
    process = subprocess.Popen(command, cwd=project.root, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert any("started" in line for line in process.stdout)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    (directory,) = (tmp_path / "jobs").iterdir()
    assert (directory / "checkpoints" / "saved").exists()
    words = next(line for line in output.splitlines() if line.startswith("to continue: shoal run ")).split()[4:]
    resumed = subprocess.run([SHOAL, "run", *words], cwd=project.root, capture_output=True, text=True, check=False)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr


KILL_TRAIN = """
import os, pathlib, signal, sys, time
def kill_train(printed):
    while not any(printed in path.read_text() for path in pathlib.Path(LOGS).rglob("log.jsonl")):
        time.sleep(0.01)
    parent = os.getppid()
    while pathlib.Path("/proc", str(parent), "comm").read_text() != "train\\n":
        parent = int(pathlib.Path("/proc", str(parent), "stat").read_text().rpartition(")")[2].split()[1])
    os.kill(parent, signal.SIGKILL)
    time.sleep(600)
"""
FORGING = """
import os, pathlib, sys, time
print("[5,algo-9] loss=0.1")
print("train: loss=0.25 step=1")
print('{"shoal_event": "output", "host": "h", "rank": 7, "stream": 1, "form": "plain", "text": "loss=1\\\\n"}')
os.write(1, b"\\xff 10%\\r20%\\r\\nhalf")
while not pathlib.Path(sys.argv[2]).exists():  # what was written is copied at once
    time.sleep(0.01)
os.write(1, b" line")
"""


def test_lines_of_a_script_are_its_own_whatever_they_look_like(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").write_text(FORGING)
    command: list[str | Path] = [SHOAL, "run", "any:1", "code/train.py", "--local", "--name", "j", "--json"]
    command += ["--metric", "defined=loss=([0-9.]+)", "--hyperparameter", f"go={tmp_path / 'go'}"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout and process.stderr
        seen = b""
        while not seen.endswith(b"\nhalf"):
            piece = os.read(process.stderr.fileno(), 4096)
            assert piece, seen
            seen += piece
        (tmp_path / "go").touch()
        seen += process.stderr.read()
        document = json.loads(process.stdout.read())
    assert b"\xff 10%\r20%\r\nhalf line" in seen
    assert document["metrics"] == {"loss": 1.0, "defined": 1.0}
    report = read_report(tmp_path / "jobs" / "j")
    own = [line for line in report.log if line.rank is not None]
    assert {(line.host, line.rank) for line in own} == {("algo-1", 0)}
    assert [line.text for line in own if "event" not in line.text] == [
        *("[5,algo-9] loss=0.1", "train: loss=0.25 step=1", "\ufffd 10%", "20%", "half line")
    ]
    assert [curve.rank for curve in report.metrics] == [0]
    logs = subprocess.run([SHOAL, "logs", "j", "--rank", "5"], cwd=tmp_path, capture_output=True, text=True)
    assert (logs.stdout, "no line has that rank" in logs.stderr) == ("", True)


LOST = f"""{KILL_TRAIN}
base = pathlib.Path(os.environ["SAGEMAKER_BASE_DIR"])
saved = base / "checkpoints" / "pid"
print("restart", os.environ.get("SHOAL_RESTART"), os.environ.get("SHOAL_RESTART_REASON"), flush=True)
if saved.exists():
    while pathlib.Path("/proc", saved.read_text()).exists():  # otherwise two starts write into one directory
        time.sleep(0.05)
    sys.exit()
saved.write_text(str(os.getpid()))
kill_train("restart 0")
"""


@pytest.mark.parametrize(("restarts", "code"), [(1, 0), (0, 137)])
def test_train_that_is_killed_starts_again_from_its_checkpoints(
    project: Project, tmp_path: Path, restarts: int, code: int
) -> None:
    source = tmp_path / "code"
    source.mkdir()
    (source / "train.py").write_text(f"LOGS = {str(tmp_path)!r}\n{LOST}")
    command: list[str | Path] = [SHOAL, "run", "pytorch", "--engine", "none", "--max-restarts", str(restarts), "--json"]
    command += ["--source", source, "--entry-point", "train.py", "--output", tmp_path, "--checkpoints", tmp_path / "ck"]
    result = subprocess.run(command, cwd=project.root, capture_output=True, text=True, check=False, timeout=120)
    assert result.returncode == code, result.stderr
    reason = "The first host algo-1 was lost: killed by SIGKILL"
    assert ("restart 0 None" in result.stderr, f"restart 1 {reason}" in result.stderr) == (True, code == 0)
    document = json.loads(result.stdout)
    assert [each["reason"] for each in document["restarts"]] == [reason][:restarts]
    assert document["checkpoints"] == str(tmp_path / "ck")
    assert (tmp_path / "ck" / "pid").exists()


ELASTIC = f"""{KILL_TRAIN}
restart, host = int(os.environ["SHOAL_RESTART"]), os.environ["SM_CURRENT_HOST"]
print("restart", restart, "of", os.environ["WORLD_SIZE"], os.environ["SM_HOSTS"], flush=True)
print("threads", os.environ["OMP_NUM_THREADS"], flush=True)
pathlib.Path(os.environ["SAGEMAKER_BASE_DIR"], "checkpoints", host + "-" + str(restart)).touch()
if (restart, host) == (0, "127.0.0.2"):
    kill_train("127.0.0.2\\", \\"threads")
if restart < 2:
    time.sleep(600)
"""


def test_elastic_job_goes_on_with_one_host_and_grows_again(project: Project, tmp_path: Path) -> None:
    source = tmp_path / "code"
    source.mkdir()
    (source / "train.py").write_text(f"LOGS = {str(tmp_path)!r}\n{ELASTIC}")
    command: list[str | Path] = [SHOAL, "run", "pytorch", "--engine", "none", "--hosts", "1:2", "--max-restarts", "1"]
    command += ["--source", source, "--entry-point", "train.py", "--output", tmp_path / "jobs", "--json"]
    result = subprocess.run(command, cwd=project.root, capture_output=True, text=True, check=False, timeout=120)
    assert result.returncode == 0, result.stderr
    assert "127.0.0.1 | " in result.stderr
    assert "127.0.0.2 was lost (killed by SIGKILL): starting it again" in result.stderr
    assert "127.0.0.2 | restart 0 of 2" in result.stderr
    assert f"127.0.0.2 | threads {max(1, len(os.sched_getaffinity(0)) // 2)}" in result.stderr, "hosts share the cores"
    document = json.loads(result.stdout)
    lost, back = (each["reason"] for each in document["restarts"])
    assert lost.startswith("The host 127.0.0.2 was lost")
    assert "127.0.0.2 came back" in back
    names = {path.name for path in Path(document["checkpoints"]).iterdir()}
    assert names >= {"127.0.0.2-0", "127.0.0.1-2", "127.0.0.2-2"}, "all share one directory"


# The ranks meet in torch's store and with gloo, and go on until the file appears.
MEETING = """\
import os, pathlib, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
end, flag = pathlib.Path(os.environ["SM_CHANNEL_TRAINING"], "end"), torch.zeros(1)
total = torch.ones(10)
dist.all_reduce(total)
pathlib.Path(os.environ["SM_CHANNEL_TRAINING"], f"pid-{os.getpid()}").touch()
while not flag.item():
    time.sleep(0.01)
    flag.fill_(float(end.exists()))
    dist.broadcast(flag, 0)
dist.all_reduce(total)
print("the sum is", total[0].item())
dist.destroy_process_group()
"""
VISITOR = r"""
import os, socket, sys
"x".encode("idna")  # before setuid: another user may not be able to read Python's files
uid, *ports = map(int, sys.argv[1:])
os.setuid(uid)
for port in ports:
    for words in (b"", bytes(8), b"\0" + (0x3C85F7CE).to_bytes(4, "little") + bytes(20)):
        with socket.create_connection(("127.0.0.1", port), 5) as connection:
            connection.settimeout(5)
            try:
                connection.sendall(words)
                print(len(connection.recv(100)))
            except OSError:
                print(0)
"""


@pytest.mark.mpi
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to act as another user")
def test_another_user_of_the_machine_is_read_by_no_rank(project: Project, tmp_path: Path) -> None:
    channel, script = tmp_path / "data", tmp_path / "code" / "train.py"
    channel.mkdir()
    script.parent.mkdir()
    script.write_text(MEETING)
    options = [
        "--engine",
        "none",
        "--procs-per-host",
        "2",
        "--channel",
        f"training={channel}",
        "--output",
        str(tmp_path),
    ]
    command: list[str | Path] = [SHOAL, "run", "pytorch", script, *options]
    with subprocess.Popen(command, cwd=project.root, stdout=-1, text=True) as job:
        try:
            until = time.monotonic() + 90
            while len(pids := [path.name[4:] for path in channel.glob("pid-*")]) < 2:
                assert job.poll() is None
                assert time.monotonic() < until
                time.sleep(0.05)
            ports = list_ports(pids)
            assert len(ports) >= 3  # the store, and gloo of each rank
            visit = [sys.executable, "-c", VISITOR, "65534", *ports]
            answers = subprocess.run(visit, capture_output=True, text=True, timeout=90, check=True).stdout.split()
            assert set(answers) == {"0"}
        finally:
            (channel / "end").touch()
        assert job.stdout is not None
        log = job.stdout.read()
    assert job.returncode == 0, log
    assert log.count("the sum is 4.0") == 2


def list_ports(pids: list[str]) -> list[str]:
    """Return the TCP ports at which processes listen."""
    files = (str(file.readlink()) for pid in pids for file in Path(f"/proc/{pid}/fd").iterdir())
    inodes = {name[8:-1] for name in files if name.startswith("socket:")}
    lines = (Path("/proc/net/tcp").read_text() + Path("/proc/net/tcp6").read_text()).splitlines()
    return [
        str(int(row[1].rpartition(":")[2], 16)) for row in map(str.split, lines) if row[3] == "0A" and row[9] in inodes
    ]
