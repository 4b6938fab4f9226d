"""A real Slurm cluster on this machine: Debian's slurmctld, slurmd and munged, each node in its own namespaces.

A node has its own address, host name, processes and /dev/shm. All share the disk. Nothing leaves the machine, and no
service of the system is started. Everything ends and is removed when the `with` block ends. Needs root.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

ROOT = Path(__file__).resolve().parents[2]
NODES = ("node-1", "node-2")
_LOGIN = "login"
_PREFIX = "10.213.79"
_INSTALL = ROOT / "scripts" / "slurm.sh"
_START_SECONDS = 60.0
_MESSAGE_SECONDS = 60  # Slurm's 10 s are too short on a machine that runs other tests
_CPUS = 2  # of each node, also on a machine with more or fewer

# `wait` also reaps what the daemon leaves behind, as a node's PID 1 does.
_ENTER = 'hostname "$0"; mount -t tmpfs tmpfs /dev/shm; "$@" & wait $!'
_ISOLATED = ("unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc")

# Nodes share /tmp, but on a real cluster each has its own.
_PROLOG = """#!/bin/sh
echo "export TMPDIR={temporary}"
"""

_CONFIGURATION = """
ClusterName=shoal
SlurmctldHost={login}({prefix}.1)
AuthType=auth/munge
AuthInfo=socket={directory}/munge
SlurmUser=root
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
TaskProlog={directory}/prolog
MpiDefault=none
FirstJobId={first_job}
SelectType=select/linear
SlurmdTimeout={node_timeout}
KillWait={kill_wait}
MessageTimeout={message_timeout}
ReturnToService=2
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@dataclass(frozen=True)
class Job:
    """How a job ended, as `scontrol show job` says."""

    number: int
    state: str
    exit_code: str  # code:signal
    log: str

    @property
    def ended(self) -> bool:
        return self.state not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING")


class Cluster:
    """A running cluster. `directory` is on the disk that all nodes share."""

    def __init__(self, directory: Path, unique: str) -> None:
        self.directory = directory
        self._unique = unique
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def run(
        self,
        *words: object,
        cwd: Path | None = None,
        user: int | None = None,
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command on the login node, and returns its end. It has none of Slurm's or this project's variables."""
        return subprocess.run(
            self.command(*words, user=user),
            cwd=cwd or self.directory,
            env=self.environment(variables),
            capture_output=True,
            text=True,
        )

    def command(self, *words: object, user: int | None = None) -> list[str]:
        """Returns the command that runs `words` on the login node, as root or as another user."""
        become = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"] if user is not None else []
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"', _LOGIN]
        return [*self._enter(_LOGIN), *named, *become, *map(str, words)]

    def environment(self, variables: Mapping[str, str] = MappingProxyType({})) -> dict[str, str]:
        """Returns the environment of a user on the login node."""
        ours = ("SM_", "SAGEMAKER_", "SHOAL_", "SLURM", "OMPI_", "PMIX_", "MASTER_", "PYTEST")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        return {**kept, "SLURM_CONF": str(self.directory / "slurm.conf"), "USER": "root", **variables}

    def ask(self, *words: object) -> str:
        """Returns the output of a command on the login node. Raises CalledProcessError if it fails."""
        done = self.run(*words)
        if done.returncode:
            raise subprocess.CalledProcessError(done.returncode, list(map(str, words)), done.stdout, done.stderr)
        return done.stdout

    def submit(self, *words: object, cwd: Path, variables: Mapping[str, str], user: int | None = None) -> int:
        """Submits a job with `sbatch`, and returns its number."""
        done = self.run("sbatch", "--parsable", *words, cwd=cwd, user=user, variables=variables)
        assert done.returncode == 0, done.stderr
        return int(done.stdout)

    def read_job(self, number: int, log: Path | None = None) -> Job:
        """Returns the present state of a job."""
        words = self.ask("scontrol", "--oneliner", "show", "job", number).split()
        facts = dict(word.split("=", 1) for word in words if "=" in word)
        path = log or Path(facts["StdOut"])
        text = path.read_text(errors="replace") if path.exists() else ""
        return Job(number, facts["JobState"], facts["ExitCode"], text)

    def wait(self, number: int, seconds: float = 60) -> Job:
        """Waits for the end of a job. Raises TimeoutError with its log if it takes longer."""
        return self.until(number, lambda job: job.ended, seconds)

    def until(self, number: int, happened: Callable[[Job], bool], seconds: float = 60) -> Job:
        """Waits until something is true of a job. Raises TimeoutError with its log if it takes longer."""
        deadline = time.monotonic() + seconds
        while not happened(job := self.read_job(number)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"after {seconds:.0f} s job {number} is {job.state}. Its log:\n{job.log}")
            time.sleep(0.1)
        return job

    def await_idle(self, seconds: float = _START_SECONDS) -> None:
        """Waits until all nodes are idle. Raises TimeoutError with their states, and the ends of the daemons' logs."""
        deadline = time.monotonic() + seconds
        while True:
            done = self.run("sinfo", "--noheader", "--Node", "--format=%N %T")
            states = dict(line.split() for line in done.stdout.splitlines())
            if set(states) == set(NODES) and set(states.values()) == {"idle"}:
                return
            if time.monotonic() > deadline:
                logs = (f"{path.name}:\n{path.read_text()[-2000:]}" for path in self.directory.glob("*.log"))
                raise TimeoutError("\n".join([f"nodes: {states} {done.stderr}", *logs]))
            time.sleep(0.05)

    def start(self, name: str, *words: object) -> None:
        """Starts a daemon on a node, as the only child of the node's PID 1."""
        command = [*self._enter(name), *_ISOLATED, "sh", "-c", _ENTER, name, *map(str, words)]
        with (self.directory / f"{name}.log").open("ab") as log:
            self._daemons[name] = subprocess.Popen(
                command, env=self.environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def start_node(self, name: str) -> None:
        """Starts a node, or starts it again."""
        _ip("-n", self.namespace(name), "link", "set", "eth0", "up")
        self.start(name, "slurmd", "-D", "-N", name)

    def lose_node(self, name: str) -> None:
        """Cuts a node's power: it is off the network at once, and all that runs there has ended."""
        _ip("-n", self.namespace(name), "link", "set", "eth0", "down")
        self._end(name)

    def close(self) -> None:
        """Ends all nodes, with all that runs there."""
        for name in list(self._daemons):
            self._end(name)

    def namespace(self, name: str) -> str:
        return f"{self._unique}-{name}"

    def _end(self, name: str) -> None:
        """Kills `unshare`, and with it the node's PID 1, and with that all processes of the node."""
        daemon = self._daemons.pop(name)
        daemon.kill()
        daemon.wait()

    def _enter(self, name: str) -> list[str]:
        return ["ip", "netns", "exec", self.namespace(name)]


@contextmanager
def start_cluster(node_timeout: int = 5, kill_wait: int = 30) -> Iterator[Cluster]:
    """A cluster with the nodes of NODES, all idle. Installs Debian's packages if they are missing.

    Args:
        node_timeout: Seconds without an answer after which Slurm takes a node for lost (SlurmdTimeout).
        kill_wait: Seconds between SIGTERM and SIGKILL (KillWait).
    """
    subprocess.run([_INSTALL], check=True)
    with ExitStack() as undo:
        # Short, as it has sockets; and open, as jobs of any user have their files here.
        directory = Path(tempfile.mkdtemp(prefix="slurm-", dir="/var/tmp"))
        unique = directory.name  # one process may run several clusters
        undo.callback(shutil.rmtree, directory, ignore_errors=True)
        directory.chmod(0o755)
        addresses = _wire(unique, undo)
        for name in NODES:
            temporary = _temporary(unique, name)
            temporary.mkdir()
            temporary.chmod(0o1777)
            undo.callback(shutil.rmtree, temporary, ignore_errors=True)
        _configure(directory, unique, addresses, node_timeout, kill_wait)
        cluster = Cluster(directory, unique)
        undo.callback(cluster.close)
        undo.callback(_end_munge, _start_munge(directory))
        cluster.start(_LOGIN, "slurmctld", "-D")
        for node in NODES:
            cluster.start_node(node)
        cluster.await_idle()
        yield cluster


def _wire(unique: str, undo: ExitStack) -> dict[str, str]:
    """Makes the network: a namespace for each node, and a bridge in the login node's. Returns the addresses by name."""
    addresses = {name: f"{_PREFIX}.{number}" for number, name in enumerate((_LOGIN, *NODES), 1)}
    names = "127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for name, address in addresses.items())
    login = f"{unique}-{_LOGIN}"
    for name, address in addresses.items():
        namespace = f"{unique}-{name}"
        _ip("netns", "add", namespace)
        undo.callback(_ip, "netns", "delete", namespace)
        config = Path("/etc/netns") / namespace
        config.mkdir(parents=True)
        undo.callback(shutil.rmtree, config)
        (config / "hosts").write_text(names)
        _ip("-n", namespace, "link", "set", "lo", "up")
        if name == _LOGIN:
            _ip("-n", login, "link", "add", "eth0", "type", "bridge")
        else:
            _ip("link", "add", "eth0", "netns", namespace, "type", "veth", "peer", name, "netns", login)
            _ip("-n", login, "link", "set", name, "master", "eth0", "up")
        _ip("-n", namespace, "address", "add", f"{address}/24", "dev", "eth0")
        _ip("-n", namespace, "link", "set", "eth0", "up")
    return addresses


def _temporary(unique: str, node: str) -> Path:
    """Returns a node's directory for temporary files: short, for sockets, and in /tmp, which containers see too."""
    return Path("/tmp") / f"{unique}-{node}"


def _configure(directory: Path, unique: str, addresses: dict[str, str], node_timeout: int, kill_wait: int) -> None:
    """Writes slurm.conf, the key of munge and the directories of the daemons."""
    nodes = "\n".join(f"NodeName={name} NodeAddr={addresses[name]} CPUs={_CPUS} State=UNKNOWN" for name in NODES)
    settings = {
        "message_timeout": _MESSAGE_SECONDS,
        "node_timeout": node_timeout,
        "kill_wait": kill_wait,
        "login": _LOGIN,
        "prefix": _PREFIX,
    }
    settings["first_job"] = random.randrange(1, 10**7)  # jobs of different clusters have different directories in jobs/
    (directory / "slurm.conf").write_text(_CONFIGURATION.format(directory=directory, nodes=nodes, **settings))
    # slurmd looks for cgroups although this configuration uses none; of v1, none need be mounted.
    (directory / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    (directory / "state").mkdir()
    for node in NODES:
        (directory / f"spool-{node}").mkdir()
    prolog = directory / "prolog"
    prolog.write_text(_PROLOG.format(temporary=_temporary(unique, "$SLURMD_NODENAME")))
    prolog.chmod(0o755)
    key = directory / "munge.key"
    key.touch(0o600)
    key.write_bytes(os.urandom(128))


def _start_munge(directory: Path) -> subprocess.Popen[bytes]:
    """Starts a munged for all nodes, and waits for its socket: it is a file, so that all nodes reach it."""
    socket = directory / "munge"
    files = {"key-file": "munge.key", "log-file": "munged.log", "pid-file": "munged.pid", "seed-file": "munge.seed"}
    options = [f"--{option}={directory / name}" for option, name in files.items()]
    command = ["munged", "--foreground", "--force", f"--socket={socket}", *options]
    munged = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + _START_SECONDS
    while not socket.exists():
        if munged.poll() is not None or time.monotonic() > deadline:
            munged.kill()
            raise TimeoutError(f"munged does not start: {(directory / 'munged.log').read_text()}")
        time.sleep(0.02)
    return munged


def _end_munge(munged: subprocess.Popen[bytes]) -> None:
    munged.send_signal(signal.SIGKILL)
    munged.wait()


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)
