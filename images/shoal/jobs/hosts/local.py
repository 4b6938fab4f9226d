"""Runs a job on this machine without Docker: `train` of this Python environment, with Open MPI from PyPI.

Each host is a `train` of its own. Names of several are loopback addresses.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

from rich.console import Console

from shoal.console import print_line
from shoal.docker_client import containers
from shoal.errors import DiskError, DockerError, UsageError
from shoal.jobs import checkpoints, distribution, gpus, job, results, run, train_events, usage, variables
from shoal.jobs.job_log import JobLog
from shoal.jobs.processes import BASE, STOP_SECONDS, read_environment
from shoal.jobs.run import Arrival, HostExit
from shoal.jobs.store import OpenJob
from shoal.jobs.train_events import STDERR, STDOUT, HostChunk, HostOutput, OutputStream
from shoal.jobs.view import View
from shoal.limits import MOST_REPORT, read_file
from shoal.matrix import project

_PR_SET_CHILD_SUBREAPER = 36  # of Linux


@dataclass
class LocalHosts:
    """The processes of a job's hosts. Each can be started again in its tree, which then has new output directories.

    All inherit the lock of the checkpoints, so that they stay locked while a host runs, also if this process is killed.
    """

    request: job.JobRequest
    view: View
    """Shows the output of the hosts."""
    train: Path
    environment: Mapping[str, str]
    """The variables that all hosts share."""
    trees: Mapping[str, Path]
    """The directory of each host that stands for its /opt/ml."""
    lock: int
    """A file descriptor."""
    meter: usage.GpuMeter = field(default_factory=usage.GpuMeter)
    """Reads the use of GPUs."""
    log: JobLog = field(default_factory=JobLog)
    """Keeps the lines of all hosts."""
    arrivals: queue.SimpleQueue[Arrival] = field(default_factory=queue.SimpleQueue)
    """Hosts that have ended."""
    ids: dict[str, str] = field(default_factory=dict)
    """The number of each host's last start."""
    _variables: dict[str, Mapping[str, str]] = field(default_factory=dict)
    _running: dict[str, tuple[subprocess.Popen[bytes], threading.Thread]] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    @property
    def console(self) -> Console:
        """The console for messages."""
        return self.view.console

    @property
    def first(self) -> str:
        """The name of the host that decides for all."""
        return next(iter(self.trees))

    def create(self, host: str, environment: Mapping[str, str] | None = None) -> None:
        """Prepares a host for a start, with variables beside the job's own. Files of an earlier start are removed."""
        tree = self.trees[host]
        if host in self.ids:
            for part in ("model", "output"):
                results.remove_tree(tree / part)
            for part in ("model", "output/data"):
                (tree / part).mkdir(parents=True)
        self._variables[host] = environment or {}
        self.ids[host] = str(next(self._numbers))

    def start(self, *hosts: str) -> None:
        """Starts `train` of hosts, and threads that put their exits into `arrivals`. Several hosts' output has names.

        Processes that a killed `train` leaves become children of this one from now on.
        """
        adopt_orphans = getattr(ctypes.CDLL(None), "prctl", lambda *_: None)
        adopt_orphans(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        several = len(self.trees) > 1
        streams: dict[str, Any] = {
            "stdout": subprocess.PIPE,
            "stderr": subprocess.STDOUT if several else subprocess.PIPE,
        }
        for host in hosts:
            environment = {**self.environment, BASE: str(self.trees[host]), **self._variables[host]}
            environment["SAGEMAKER_SUBMIT_DIRECTORY"] = str(self.trees[host] / "code")
            command = [str(self.train), *self.request.train_command[1:]]
            process = subprocess.Popen(command, env=environment, pass_fds=[self.lock], **streams)
            thread = threading.Thread(target=self._await_end, args=(host, self.ids[host], process), daemon=True)
            self._running[host] = process, thread
            thread.start()

    def _await_end(self, host: str, number: str, process: subprocess.Popen[bytes]) -> None:
        """Body of a thread: prints the output of a host, and puts its exit into `arrivals`."""
        readers = self._start_readers(host, process)
        code = process.wait()
        if code < 0:
            # They would still write checkpoints.
            kill_orphans(self.trees[host])
        for reader in readers:
            reader.join(timeout=10)  # a process of the script may live on, with this stream
        self.arrivals.put((host, number, HostExit(128 - code if code < 0 else code)))

    def _start_readers(self, host: str, process: subprocess.Popen[bytes]) -> list[threading.Thread]:
        """One host's bytes are not changed, unless they go to the terminal of a live view."""
        copies = _open_copies(self.console.file.fileno()) if process.stderr else {}
        pipes = [(pipe, number) for pipe, number in ((process.stdout, STDOUT), (process.stderr, STDERR)) if pipe]
        readers = [
            threading.Thread(target=self._read_output, args=(host, *pair, copies), daemon=True) for pair in pipes
        ]
        for reader in readers:
            reader.start()
        return readers

    def _read_output(self, host: str, pipe: IO[bytes], number: int, copies: Mapping[int, _Copy]) -> None:
        """Body of a thread: keeps the lines of a host. Copies or shows them, of several hosts with the host's name."""
        chunks = iter(lambda: os.read(pipe.fileno(), 1 << 16), b"")
        for chunk in HostOutput(host, self.log, number).read(chunks):
            copy = copies.get(chunk.stream.number)
            if copy and not (self.view.is_live and os.isatty(copy.target)):
                copy.write(chunk)
                continue
            for text, line, is_overwritten in chunk.lines:
                self.view.add(text if copy else f"{host} | {text}", line, is_overwritten)

    def stop(self, hosts: Iterable[str]) -> None:
        """Stops hosts, all at the same time, and waits for them; an interrupt ends the wait."""
        stopping = [self._running[host] for host in hosts]
        for process, _ in stopping:
            process.terminate()
        for _, thread in stopping:
            thread.join()

    def kill(self) -> None:
        """Kills all hosts that still run, with their processes."""
        for process, _ in self._running.values():
            process.kill()
        for _, thread in self._running.values():
            thread.join()

    def join_readers(self) -> None:
        """Does nothing: an exit is in `arrivals` only when the log is read."""

    def read_usage(self) -> Mapping[str, usage.Usage]:
        """Returns the use of this machine."""
        return usage.read_machine(self.meter)

    def end_interrupted(self, opened: OpenJob) -> None:
        """Kills the hosts that a second interrupt did not wait for, and collects their checkpoints."""
        self.collect(opened)

    def collect(self, opened: OpenJob) -> Mapping[str, Path]:
        """Kills hosts that still run, and moves checkpoints to their directory. Returns the tree of each host.

        If the checkpoints cannot be copied, that is printed, and they stay in the tree of the first host.
        """
        shared = self.trees[self.first]
        with containers.delay_interrupts():
            self.kill()
            try:
                checkpoints.collect_tree(shared, opened.checkpoints)
                opened.update(uncollected=False)
            except (OSError, shutil.Error, RecursionError, DiskError) as error:  # the job has its result all the same
                place = shared / checkpoints.CONTENT
                print_line(f"the checkpoints were not collected: {error}. They are in {place}", self.console)
        return self.trees

    def begin_removal(self, opened: OpenJob, has_succeeded: bool) -> None:
        """Does nothing: the processes have ended."""

    def remove_copies(self, is_collected: bool) -> None:
        """Removes the copies of the code, and if they are collected, of the checkpoints."""
        for tree in self.trees.values():
            if is_collected:
                results.remove_tree(tree / checkpoints.CONTENT)
            results.remove_tree(tree / "code")

    def has_result(self, host: str) -> bool:
        """Returns whether `train` has written a result on a host."""
        return any((self.trees[host] / "output" / name).exists() for name in ("success", "failure"))

    def read_restarts(self, host: str) -> list[dict[str, Any]]:
        """Returns the restarts that `train` has listed in job.json on a host; none if it has not."""
        try:
            return run.parse_restarts(read_file(self.trees[host] / "output" / "job.json", MOST_REPORT))
        except (OSError, ValueError):
            return []


@dataclass
class _Copy:
    """A file descriptor that gets output at once and unchanged. After an error nothing more is written."""

    target: int
    _is_broken: bool = False
    _writer: OutputStream | None = None
    _last: bytes = b"\n"

    def write(self, chunk: HostChunk) -> None:
        """Writes output. It begins a new line if the last one is of another writer."""
        data = chunk.encode()
        if not data or self._is_broken:
            return
        if chunk.stream != self._writer and self._last != b"\n":
            data = b"\n" + data
        self._writer, self._last = chunk.stream, data[-1:]
        try:
            while data:
                data = data[os.write(self.target, data) :]
        except OSError:  # the reader of our output has gone
            self._is_broken = True


def _open_copies(stdout: int) -> dict[int, _Copy]:
    """Returns the copies of both streams; one for both if they are the same file."""
    copy = _Copy(stdout)
    return {STDOUT: copy, STDERR: copy if os.path.sameopenfile(stdout, STDERR) else _Copy(STDERR)}


def kill_orphans(tree: Path) -> None:
    """Kills the processes of a host's tree that `train` has left, which have become children of this one.

    Others of this host become children when their parents end, and are killed then.
    """
    while orphans := [pid for pid in _list_children() if read_environment(pid).get(BASE) == str(tree)]:
        for pid in orphans:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _list_children() -> list[int]:
    files = Path("/proc/self/task").glob("*/children")
    return [int(pid) for file in files for pid in file.read_text().split()]


_MOST_HOSTS = 254
SECRETS = ".secrets"
"""The directory with the user's secrets, while the job runs. A resumed job leaves names with a dot in their place."""


def run_job_locally(opened: OpenJob, view: View) -> job.FinishedJob:
    """Runs a job on this machine to its end. All ranks run on one host, so the world size is as requested.

    With a range of hosts, each is a `train` of its own, on a loopback address and without GPUs.

    Each host's /opt/ml tree stays in the job's directory, without the copy of the code. Checkpoints move from it to
    their own directory, also if the job fails. An interrupt ends `train`, which ends its ranks, and is raised again. A
    second interrupt kills both.

    The job has a TMPDIR of its own. In /tmp, another user can make a directory before the job does. The cache of
    torch.compile has a known name there, and ranks load programs from it.

    Args:
        opened: The job, which the caller has checked.
        view: Shows the output of `train`, and has the console for messages.

    Raises:
        DockerError: If this Python environment has no `train`, or the machine lacks the requested GPUs.
        UsageError: If the source cannot be copied, or MPI would start ranks on several hosts of this machine.
    """
    try:
        with (
            TemporaryDirectory(prefix="shoal-", ignore_cleanup_errors=True) as temporary,
            usage.measure_machine(usage.MACHINE, opened.record.request.gpus) as meter,
        ):
            hosts = _create_hosts(opened, view, temporary, meter)
            try:
                return run.run_job(opened, hosts)
            finally:
                hosts.kill()
                hosts.remove_copies(is_collected=not opened.record.uncollected)
    finally:
        results.remove_tree(opened.directory / SECRETS)


def _create_hosts(opened: OpenJob, view: View, temporary: str, meter: usage.GpuMeter) -> LocalHosts:
    """Makes the tree of each host, and returns hosts that are ready to start. They share a directory of checkpoints."""
    train = Path(sys.executable).with_name("train")
    if not train.exists():
        toolkit = project.find_shipped().root / "toolkit"
        raise DockerError(
            f"`train` is not installed next to {sys.executable}. Fix: {sys.executable} -m pip install {toolkit}"
        )
    request = opened.record.request
    merged = request if request.min_hosts else merge_hosts(request, view.console)
    names = list_loopback_names(request) if request.min_hosts else merged.host_names
    trees = {name: opened.directory / name for name in names}
    shared = trees[names[0]] / checkpoints.CONTENT
    for name, tree in trees.items():
        job.write_tree(tree, merged, opened.name)
        config = job.encode_resource_config(names, name, "lo" if request.min_hosts else "eth0")
        job.write_private(tree / job.RESOURCE_CONFIG, config)
        for channel, path in request.channels.items():
            (tree / "input" / "data" / channel).symlink_to(path.resolve(), target_is_directory=True)
        if tree != trees[names[0]]:
            (tree / checkpoints.CONTENT).rmdir()
            (tree / checkpoints.CONTENT).symlink_to(shared, target_is_directory=True)
    opened.checkpoints.copy_to(shared)
    _replace_secrets(request, opened.directory / SECRETS)
    search_path = f"{train.parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    environment = {**_make_environment(opened, temporary), "PATH": search_path}
    hosts = LocalHosts(request, view, train, environment, trees, opened.checkpoints.lock, meter, opened.log)
    for name in names:
        hosts.create(name)
    return hosts


def _make_environment(opened: OpenJob, temporary: str) -> dict[str, str]:
    """Returns the variables that all hosts share. Several hosts get free ports, so that jobs can run side by side."""
    request = opened.record.request
    environment = {
        "SHOAL_STOP_GRACE": str(STOP_SECONDS),
        **(job.share_cpus(request, len(os.sched_getaffinity(0))) if request.min_hosts else {}),
        **job.MEMBERS_ONLY,
        **train_events.SWITCH,
        **os.environ,
        "TMPDIR": temporary,
        **_gpu_environment(request.gpus),
        **request.script_variables,
        **job.limit_variables(request.max_restarts, request.min_hosts),
        **variables.locate_secrets(request.secrets, str(opened.directory / SECRETS)),
        **request.environment,
        "TRAINING_JOB_NAME": opened.name,
    }
    if request.min_hosts:
        environment["CUDA_VISIBLE_DEVICES"] = ""
        with socket.create_server(("", 0)) as agent, socket.create_server(("", 0)) as master:
            environment.setdefault("SHOAL_AGENT_PORT", str(agent.getsockname()[1]))
            environment.setdefault("MASTER_PORT", str(master.getsockname()[1]))
    if job.SECRET_FILE not in environment and (secret := job.make_secret(request.environment)):
        environment.setdefault(job.SECRET, secret)
    return environment


def _replace_secrets(request: job.JobRequest, directory: Path) -> None:
    """Replaces the directory by a new private one with a file for each secret. The caller removes it."""
    results.remove_tree(directory)  # of a command that was killed; a job that was copied here may have a link
    directory.mkdir(mode=0o700)
    for name, content in variables.read_secrets(request.secrets).items():
        job.write_private(directory / name, content, 0o400)


def list_loopback_names(request: job.JobRequest) -> list[str]:
    """Returns the addresses that are the names of several hosts on this machine.

    Raises `UsageError` if the job needs MPI or GPUs: mpirun takes these hosts for one, and they would share the GPUs.
    """
    launch = distribution.set_processes_per_host(request.distribution, request.procs_per_host)
    uses_mpi = distribution.uses_mpirun(launch)
    for option, problem in {
        f"{request.hosts} hosts": request.hosts > _MOST_HOSTS and f"at most {_MOST_HOSTS} hosts fit on one machine",
        "--procs-per-host or --distribution": uses_mpi and "MPI takes several hosts on one machine for one",
        f"--gpus {request.gpus}": request.gpus not in (None, gpus.NONE) and "the hosts would share the GPUs",
    }.items():
        if problem:
            raise UsageError(
                f"--hosts {request.min_hosts}:{request.hosts} --engine none: {problem}. Fix: leave out {option}, or"
                " --engine none"
            )
    return [f"127.0.0.{number}" for number in range(1, request.hosts + 1)]


def merge_hosts(request: job.JobRequest, console: Console) -> job.JobRequest:
    """Returns the request with all ranks on one host, started by MPI, or torchrun if selected; print a line then.

    A request for one host is returned as it is. Raises `UsageError` if there are several hosts, and `distribution`
    contradicts `procs_per_host`.
    """
    if request.hosts == 1:
        return request
    launch = request.launch
    key = distribution.find_rank_launcher(launch)
    per_host = launch.get(key, {}).get("processes_per_host", 1)
    ranks = request.hosts * per_host
    print_line(
        f"without Docker: {request.hosts} hosts × {per_host} ranks run as 1 host × {ranks} ranks on this machine",
        console,
    )
    launcher = {"enabled": True, **launch.get(key, {}), "processes_per_host": ranks}
    return replace(request, hosts=1, procs_per_host=None, distribution={**launch, key: launcher})


def _gpu_environment(option: str | None, devices: Path = Path("/dev")) -> dict[str, str]:
    """Raises `DockerError` if GPUs are requested, and this machine has none. Their numbers are not checked."""
    if option is None:
        return {}
    if option != gpus.NONE and not list(devices.glob("nvidia[0-9]*")):
        raise DockerError(f"--gpus {option}: this machine has no NVIDIA GPU. Fix: leave out --gpus, or use --gpus none")
    return {} if option == gpus.ALL else {"CUDA_VISIBLE_DEVICES": "" if option == gpus.NONE else option}
