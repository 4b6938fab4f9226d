"""Jobs of `train` on hosts of this machine, timed and looked at: network namespaces, each with `train` as its PID 1.

A host starts before the clock does, and waits at a gate: starting containers is not the work of `train`.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from hosts import INTERFACE, Host
from processor_times import listen, sum_by_program

MPI, TORCHRUN, PROCESS, PYTHON = "mpirun", "torchrun", "process", "python"
"""The launchers, and a Python that does nothing."""
LAUNCHERS = (PROCESS, TORCHRUN, MPI)
FIRST, OTHERS = "first host", "each other host"
_HYPERPARAMETER = {MPI: "sagemaker_mpi_enabled", TORCHRUN: "sagemaker_torch_distributed_enabled"}
_ISOLATED = ("unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc")
_ENTER = 'hostname "$0"; mount -t tmpfs tmpfs /dev/shm; : >"$READY"; read -r _ <"$GATE"; exec "$@"'
# In place of torchrun, which imports torch for seconds on every host: it starts the one rank of its host.
_TORCHRUN = """\
import os, sys
words = sys.argv[1:]
options = {word[2:]: words[index + 1] for index, word in enumerate(words) if word in ("--node_rank", "--nnodes")}
os.environ.update(RANK=options["node_rank"], WORLD_SIZE=options["nnodes"], LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
command = words[words.index("--") + 1 :]
sys.exit(os.waitstatus_to_exitcode(os.spawnv(os.P_WAIT, command[0], [word.replace("$$", "$") for word in command])))
"""
# A rank that says that it runs, and waits.
_WAITING = """\
import os, time
open(os.path.join(os.environ["BENCHMARK"], "up." + os.environ["RANK"]), "w").close()
while not os.path.exists(os.path.join(os.environ["BENCHMARK"], "end")): time.sleep(0.1)
"""
_SECONDS_AT_MOST = 600
_SETTLED_SECONDS = 1.5  # after the last rank has started, for the processes that only start others


class Times(NamedTuple):
    """How long a job took on all hosts: on the clock, and of the processors."""

    wall: float
    cpu: float
    programs: Mapping[tuple[str, str], float]  # FIRST or OTHERS, and the program's name → seconds of the processors


class Costs(NamedTuple):
    """The first host's processes but the script: their memory and open files."""

    kilobytes: float  # private memory and page tables
    files: float


def run(hosts: Sequence[Host], launcher: str, directory: Path) -> Times:
    """Runs a job that does nothing. Returns the times from the start of all hosts until the last one has ended."""
    with _started(hosts, launcher, directory, "") as processes, listen() as reports:
        cpu, start = _cpu_seconds(), time.perf_counter()
        with _open_gate(directory, len(hosts)):
            _wait(processes, directory)
        wall, cpu = time.perf_counter() - start, _cpu_seconds() - cpu
        roots = {process.pid: OTHERS if number else FIRST for number, process in enumerate(processes)}
        return Times(wall, cpu, sum_by_program(reports.read(), roots))


def look(hosts: Sequence[Host], launcher: str, directory: Path) -> Costs:
    """Runs a job that waits, and returns the costs of its first host while all ranks run."""
    with _started(hosts, launcher, directory, _WAITING) as processes, _open_gate(directory, len(hosts)):
        _await(directory, "up.*", len(hosts))
        time.sleep(_SETTLED_SECONDS)
        found = [_read_costs(pid) for pid in _find_descendants(processes[0].pid) if not _is_rank(pid)]
        (directory / "end").touch()
        _wait(processes, directory)
    return Costs(sum(each.kilobytes for each in found), sum(each.files for each in found))


@contextmanager
def _started(
    hosts: Sequence[Host], launcher: str, directory: Path, script: str
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Starts the hosts up to the gate. Kills what still runs at the end, and removes their files."""
    directory.mkdir()
    os.mkfifo(directory / "gate")
    names = [f"algo-{number + 1}" for number in range(len(hosts))]
    table = "127.0.0.1 localhost\n" + "".join(f"{host.address} {name}\n" for host, name in zip(hosts, names))
    with ExitStack() as undo:
        undo.callback(shutil.rmtree, directory)
        processes = []
        for host, name in zip(hosts, names):
            etc = Path("/etc/netns", host.namespace)
            etc.mkdir(parents=True)
            undo.callback(shutil.rmtree, etc)
            (etc / "hosts").write_text(table)
            base = _write_tree(directory / name, launcher, script, name, names)
            processes.append(_start(host, name, launcher, base))
            undo.callback(_end, processes[-1])
        _await(directory, "ready.*", len(hosts))
        yield processes


def _write_tree(base: Path, launcher: str, script: str, name: str, names: Sequence[str]) -> Path:
    """Writes the files that SageMaker writes to /opt/ml of a host."""
    for part in ("input/config", "code", "model", "tmp"):
        (base / part).mkdir(parents=True)
    (base / "code" / "train.py").write_text(script)
    chosen = {_HYPERPARAMETER[launcher]: "true"} if launcher in _HYPERPARAMETER else {}
    resources = {"current_host": name, "hosts": names, "network_interface_name": INTERFACE}
    (base / "input" / "config" / "hyperparameters.json").write_text(json.dumps(chosen))
    (base / "input" / "config" / "resourceconfig.json").write_text(json.dumps(resources))
    if launcher == TORCHRUN:
        replaced = base / "replaced" / "torch" / "distributed"
        replaced.mkdir(parents=True)
        for package in (replaced.parent, replaced):
            (package / "__init__.py").touch()
        (replaced / "run.py").write_text(_TORCHRUN)
    return base


def _start(host: Host, name: str, launcher: str, base: Path) -> subprocess.Popen[bytes]:
    """Starts `train` on a host, or Python, behind the gate; its output goes to files."""
    directory = base.parent
    variables = {
        "BENCHMARK": str(directory),
        "GATE": str(directory / "gate"),
        "READY": str(directory / f"ready.{name}"),
        "SAGEMAKER_BASE_DIR": str(base),
        "SAGEMAKER_PROGRAM": "train.py",
        "SHOAL_JOB_SECRET": "of the benchmark",
        "TMPDIR": str(base / "tmp"),
        "PATH": os.environ["PATH"],
        **({"PYTHONPATH": str(base / "replaced")} if launcher == TORCHRUN else {}),
    }
    python = [sys.executable, "-I", "-S", "-c", "pass"]
    command = python if launcher == PYTHON else [str(Path(sys.executable).with_name("train"))]
    words = host.command(*_ISOLATED, "sh", "-c", _ENTER, f"container-of-{name}", *command)
    with (directory / f"{name}.log").open("wb") as log:
        return subprocess.Popen(words, env=variables, stdout=log, stderr=log)


@contextmanager
def _open_gate(directory: Path, hosts: int) -> Iterator[None]:
    """Lets the hosts go on, all at once."""
    with (directory / "gate").open("wb", buffering=0) as gate:
        gate.write(b"\n" * hosts)
        yield


def _wait(processes: Sequence[subprocess.Popen[bytes]], directory: Path) -> None:
    """Waits for all hosts. Raises SystemExit if one fails."""
    deadline = time.monotonic() + _SECONDS_AT_MOST
    for number, process in enumerate(processes):
        code = process.wait(max(0, deadline - time.monotonic()))
        if code:
            raise SystemExit(
                f"algo-{number + 1}: exit code {code}\n{(directory / f'algo-{number + 1}.log').read_text()}"
            )


def _await(directory: Path, pattern: str, count: int) -> None:
    """Waits until there are as many files of a name. Raises SystemExit after 10 minutes."""
    deadline = time.monotonic() + _SECONDS_AT_MOST
    while len(list(directory.glob(pattern))) < count:
        if time.monotonic() > deadline:
            raise SystemExit(f"{directory}: fewer than {count} of {pattern} after {_SECONDS_AT_MOST} s")
        time.sleep(0.02)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def _cpu_seconds() -> float:
    """Returns the processor time of all child processes that have ended, and of their child processes."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _find_descendants(pid: int) -> list[int]:
    children = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [each for child in children for each in (child, *_find_descendants(child))]


def _is_rank(pid: int) -> bool:
    """Whether a process is the script, or the shell or torchrun that starts it. mpirun has options before it."""
    words = Path(f"/proc/{pid}/cmdline").read_bytes()
    return b"train.py" in words and b"--host" not in words


def _read_costs(pid: int) -> Costs:
    """Returns the memory that only this process has, with its page tables, and its open files.

    Pages of programs and libraries are not counted: all processes of the machine share them.
    """
    process = Path(f"/proc/{pid}")
    lines = "".join(process.joinpath(name).read_text() for name in ("smaps_rollup", "status")).splitlines()
    kilobytes = {line.split(":")[0]: int(line.split()[1]) for line in lines if line.endswith(" kB")}
    return Costs(kilobytes["Pss_Anon"] + kilobytes["VmPTE"], len(list(process.joinpath("fd").iterdir())))
