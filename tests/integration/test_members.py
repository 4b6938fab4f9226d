"""Who does not belong to a job of `shoal run` reaches its ports, and is heard by no process: with each launcher.

The strangers are a user of this machine without rights, and a container on the job's own network.
"""

from __future__ import annotations

import json
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import docker
import pytest

from shoal.matrix.spec import BuildSpec

from ..tested_images import PYTORCH_CPU
from .test_run import SHOAL

pytestmark = pytest.mark.long
STRANGER = 65534
SECONDS = 150

# Each goes on until the file `end` is in the channel, and then computes something that needs all ranks.
TORCH = """
import pathlib, time, torch, torch.distributed as dist
dist.init_process_group({backend!r})
end = pathlib.Path("/opt/ml/input/data/training/end")
total, flag = torch.ones(1000), torch.zeros(1)
while not flag.item():
    dist.all_reduce(total)
    total.fill_(1)
    flag.fill_(float(end.exists()))
    dist.broadcast(flag, 0)
    time.sleep(0.01)
dist.all_reduce(total)
print("the sum is", total[0].item())
dist.destroy_process_group()
"""
WAIT = """
import pathlib, time
end = pathlib.Path("/opt/ml/input/data/training/end")
while not end.exists():
    time.sleep(0.1)
"""
# Each task adds 1 to a variable on the second host's parameter server, and waits for the other's.
PARAMETER_SERVER = """\
import json, os, time
import tensorflow as tf
config = json.loads(os.environ["TF_CONFIG"])
task = config["task"]
server = tf.distribute.Server(tf.train.ClusterSpec(config["cluster"]), job_name=task["type"], task_index=task["index"])
with tf.Graph().as_default(), tf.device("/job:ps/task:1"):
    total = tf.compat.v1.get_variable("total", initializer=0.0, use_resource=True)
    add, unset = total.assign_add(1.0), tf.compat.v1.report_uninitialized_variables()
    with tf.compat.v1.Session(server.target) as session:
        if task["type"] == "master":
            session.run(total.initializer)
        while len(session.run(unset)):
            time.sleep(0.1)
        session.run(add)
        while session.run(total) < 2:
            time.sleep(0.1)
        print("the servers hold", session.run(total))
"""

MIRRORED = """\
import tensorflow as tf
strategy = tf.distribute.MultiWorkerMirroredStrategy()
with strategy.scope():
    value = tf.Variable(1.0)
total = strategy.run(lambda: tf.distribute.get_replica_context().all_reduce("sum", value))
total = float(tf.reduce_sum(strategy.experimental_local_results(total)))
print("replicas", strategy.num_replicas_in_sync, "sum", total)
"""


class Launcher(NamedTuple):
    """A way to start ranks, and its script."""

    name: str
    image: str
    """An image of buildspec.yml, or a tag."""
    distribution: Mapping[str, object]
    script: str
    ports: int
    """The least number of ports at which processes of the two hosts listen."""
    last: str
    """A part of the script's last line."""


TORCH_2 = PYTORCH_CPU
MPI = {"mpi": {"enabled": True, "processes_per_host": 2}}
LAUNCHERS = [
    Launcher("mpirun", TORCH_2, MPI, TORCH.format(backend="gloo"), 5, "the sum is 4.0"),
    Launcher(
        "torchrun",
        "pytorch",
        {"torch_distributed": {"enabled": True}},
        TORCH.format(backend="gloo"),
        1,  # gloo of torch 2.0 does not listen any more once the ranks have met
        "the sum is 2.0",
    ),
    Launcher(
        "smddp",
        TORCH_2,
        {"smdistributed": {"dataparallel": {"enabled": True}}},
        "import smdistributed.dataparallel.torch.torch_smddp\n" + TORCH.format(backend="smddp"),
        2,
        "the sum is 2.0",
    ),
    Launcher(
        "parameter-server",
        "tensorflow",
        {"parameter_server": {"enabled": True}},
        WAIT + PARAMETER_SERVER,
        2,
        "the servers hold 2.0",
    ),
    Launcher(
        "mirrored",
        "tensorflow",
        {"multi_worker_mirrored_strategy": {"enabled": True}},
        MIRRORED + WAIT,
        2,
        "replicas 2 sum 2.0",
    ),
]

# Speaks to each port in several ways, reads the answer, and prints what it has read.
ATTACK = r"""
import os, socket, sys
"x".encode("idna")  # before setuid: another user may not be able to read Python's files
uid, seconds, *targets = sys.argv[1:]
os.setuid(int(uid))
# HTTP/2 as gRPC, torch's store (its magic number), Open MPI, a rank's number, and silence
words = [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0", b"\0" + (0x3C85F7CE).to_bytes(4, "little") + bytes(20),
         b"\1\0\0\0\0\0\0\0" * 8, bytes(8), b""]
def visit(host, port, words):
    try:
        connection = socket.create_connection((host, int(port)), float(seconds))
    except OSError:
        return "unreachable"
    with connection:
        connection.settimeout(5)
        try:
            connection.sendall(words)
            return connection.recv(100)
        except OSError as error:
            return type(error).__name__

for target in targets:
    host, _, port = target.rpartition(":")
    for said in words * 3:
        answer = visit(host, port, said)
        print(target, answer)
        if answer == "unreachable":
            break
"""


UNHEARD = ("b''", "ConnectionResetError", "BrokenPipeError")


class RunningJob(NamedTuple):
    """A job that `shoal run` runs in the background."""

    process: subprocess.Popen[str]
    output: Path
    channel: Path
    containers: list[docker.models.containers.Container]

    def finish(self) -> str:
        """Let the script end, and return the job's output."""
        (self.channel / "end").touch()
        self.process.wait(SECONDS)
        return self.output.read_text()


@pytest.fixture(params=LAUNCHERS, ids=lambda launcher: launcher.name)
def launcher(request: pytest.FixtureRequest) -> Launcher:
    found: Launcher = request.param
    return found


@pytest.fixture
def running_job(
    launcher: Launcher, matrix: BuildSpec, client: docker.DockerClient, tmp_path: Path
) -> Iterator[RunningJob]:
    image = launcher.image if ":" in launcher.image else matrix.select(launcher.image).tag
    code, channel, output = tmp_path / f"code{secrets.token_hex(4)}", tmp_path / "channel", tmp_path / "log"
    code.mkdir()
    channel.mkdir()
    (code / "train.py").write_text(launcher.script)
    name = f"members-{secrets.token_hex(4)}"
    command: list[str | Path] = [
        SHOAL,
        "run",
        image,
        code / "train.py",
        "--hosts",
        "2",
        "--name",
        name,
        "--output",
        tmp_path / "jobs",
    ]
    options = ["--distribution", json.dumps(launcher.distribution), "--channel", f"training={channel}"]
    with output.open("w") as log:
        process = subprocess.Popen([*command, *options], stdout=log, stderr=log, text=True)
    try:
        yield RunningJob(process, output, channel, _await_containers(client, name, process))
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(SECONDS)


def _await_containers(
    client: docker.DockerClient, name: str, process: subprocess.Popen[str]
) -> list[docker.models.containers.Container]:
    """Return the containers of a job when both run."""
    until = time.monotonic() + SECONDS
    while time.monotonic() < until and process.poll() is None:
        listed = client.containers.list(ignore_removed=True)
        found = [each for each in listed if re.fullmatch(f"{name}-.*-algo-[12]", str(each.name))]
        if len(found) == 2:
            return sorted(found, key=lambda each: str(each.name))
        time.sleep(0.1)
    raise AssertionError("the job's containers do not run")


def _find_targets(job: RunningJob) -> list[str]:
    """Return ADDRESS:PORT of each port at which the job's containers listen and that others can reach."""
    targets = []
    for container in job.containers:
        container.reload()
        (network,) = container.attrs["NetworkSettings"]["Networks"].values()
        output = container.exec_run(["sh", "-c", "cat /proc/net/tcp /proc/net/tcp6"]).output
        assert isinstance(output, bytes)
        rows = output.decode().splitlines()
        for words in map(str.split, rows):
            address, _, port = words[1].rpartition(":")
            if words[3] == "0A" and not address.endswith("7F"):  # not Docker's name server
                targets.append(f"{network['IPAddress']}:{int(port, 16)}")
    return targets


def await_targets(job: RunningJob, count: int) -> list[str]:
    """Return the targets when there are so many and the ranks have met: no new ones for a second."""
    until, earlier, since = time.monotonic() + SECONDS, None, 0.0
    while time.monotonic() < until and job.process.poll() is None:
        targets = _find_targets(job)
        if targets != earlier:
            earlier, since = targets, time.monotonic()
        elif len(targets) >= count and time.monotonic() > since + 1:
            return targets
        time.sleep(0.2)
    raise AssertionError(f"{earlier}, {job.output.read_text()}")


def _assert_unheard(answers: str, targets: list[str], *others: str) -> None:
    lines = answers.splitlines()
    assert {line.split()[0] for line in lines} == set(targets)
    heard = [line for line in lines if line.split(" ", 1)[1] not in (*UNHEARD, *others)]
    assert not heard


def test_strangers_are_read_by_no_rank(
    launcher: Launcher, running_job: RunningJob, client: docker.DockerClient
) -> None:
    """A user of this machine, and then a container on the job's network."""
    targets = await_targets(running_job, launcher.ports)
    command = [sys.executable, "-c", ATTACK, str(STRANGER), "30", *targets]
    attack = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=True)
    _assert_unheard(attack.stdout, targets)
    (network,) = running_job.containers[0].attrs["NetworkSettings"]["Networks"]
    command = ["python3", "-c", ATTACK, "0", "30", *targets]
    answers = client.containers.run(TORCH_2, command, network=network, remove=True).decode()
    _assert_unheard(answers, targets)
    log = running_job.finish()
    assert running_job.process.returncode == 0, log
    assert launcher.last in log
    assert "refused a connection from" in log


@pytest.mark.parametrize("network", ["bridge", "host"])
@pytest.mark.parametrize("launcher", [LAUNCHERS[1]], ids=lambda launcher: launcher.name)
def test_a_container_elsewhere_is_read_by_no_rank(
    launcher: Launcher, running_job: RunningJob, client: docker.DockerClient, network: str
) -> None:
    targets = await_targets(running_job, launcher.ports)
    command = ["python3", "-c", ATTACK, "0", "3" if network == "bridge" else "30", *targets]
    answers = client.containers.run(TORCH_2, command, network=network, remove=True).decode()
    _assert_unheard(answers, targets, *(["unreachable"] if network == "bridge" else []))
    log = running_job.finish()
    assert running_job.process.returncode == 0, log
    assert launcher.last in log
