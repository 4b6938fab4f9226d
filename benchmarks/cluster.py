"""Measures jobs on many hosts: `make bench-cluster`. It needs root, for network namespaces of this machine.

The jobs do nothing on 2, 8, 32, 64 and 256 hosts, with one rank each. The launchers are a plain process, torchrun and
mpirun. A small program replaces torchrun, which imports torch for seconds on every host.

- `cluster-noop-LAUNCHER-Nhosts`: from the start of all hosts until `train` has ended on the last one. The rival is the
  same number of Pythons that do nothing (`python -I -S -c pass`), started in the same way. The hosts share the cores
  of this machine: a real cluster has its own for each.
- `cluster-cpu-LAUNCHER`: the processor time of each more host, from 64 to 256 hosts. The rival is the same from 2 to
  64 hosts. After each job, two lines have the processor time of its programs, as Linux reports it. The script is
  `python3`. A process that has not yet become another program counts as its parent or as `sh`. The line `profile`
  has programs that a host starts, each measured alone.
- `cluster-memory-LAUNCHER`, `cluster-files-LAUNCHER`: the first host's private memory with page tables, and its open
  files, for each more host, while the ranks run. The processes are `train`, mpirun and their child processes, but not
  the script. They are read in separate jobs.
- `cluster-model-LAUNCHER`: the relative error of the model at 256 hosts. The model is a line through the processor
  times at 2, 8, 32 and 64 hosts.

- `slurm-…`: a job of 2 nodes, see `cluster_slurm.py`.

The lines for 1,000 hosts are of that MODEL, not measured. Use a machine without other load: a host counts as lost after
10 s of silence.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

import cluster_slurm
from cluster_hosts import FIRST, LAUNCHERS, MPI, OTHERS, PYTHON, Costs, Times, look, run
from hosts import Host, missing, switched_hosts
from report import Figure, finish, make_parser, print_machine
from scale_model import errors, fit

SLURM = "slurm"
COUNTS = (2, 8, 32, 64, 256)
MODELLED = 1000
MANY, MOST_ROUNDS = 256, 3  # of jobs with that many hosts
SECONDS = {64: 6.0, MANY: 8.0}  # of mpirun
PROCESSOR_SECONDS, KILOBYTES, FILES = 0.03, 100, 3
GROWTH, MODEL_ERROR = 1.25, 0.25
LEAST = 0.1  # ms of a program, to be shown


def main(arguments: Sequence[str]) -> int:
    """Measure, fit, and print the figures. Returns the exit code: 2 if this machine can't have such hosts."""
    parser = make_parser(__doc__, 5)
    parser.add_argument(
        "--hosts", type=int, nargs="+", default=COUNTS, metavar="N", help="three or more numbers (2 8 32 64 256)"
    )
    launchers = (*LAUNCHERS, SLURM)
    parser.add_argument("--launcher", choices=launchers, nargs="+", default=launchers, help="only these")
    options = parser.parse_args(arguments)
    problem = missing("unshare")
    if problem:
        print(f"no hosts on this machine, it lacks {problem}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # hosts and the cluster are ended then
    print_machine()
    figures = measure_hosts(sorted(options.hosts), [each for each in options.launcher if each != SLURM], options.rounds)
    return finish([*figures, *(cluster_slurm.measure(options.rounds) if SLURM in options.launcher else [])])


def measure_hosts(counts: Sequence[int], launchers: Sequence[str], rounds: int) -> list[Figure]:
    """Returns the figures of jobs with these numbers of hosts, all on this machine; none without a launcher."""
    figures: list[Figure] = []
    if not launchers:
        return figures
    with switched_hosts(counts[-1]) as hosts, tempfile.TemporaryDirectory() as directory:
        job = Path(directory, "job")
        floor = {count: measure(hosts[:count], PYTHON, job, rounds) for count in counts}
        print_profile(rise(floor, *counts[-2:]))
        for launcher in launchers:
            times = {count: measure(hosts[:count], launcher, job, rounds) for count in counts}
            costs = {count: look(hosts[:count], launcher, job) for count in (counts[0], counts[-1])}
            figures += time_figures(launcher, times, floor)
            figures += cost_figures(launcher, costs)
            figures.append(check_model(launcher, times))
    return figures


def measure(hosts: Sequence[Host], launcher: str, directory: Path, rounds: int) -> Times:
    """Returns the medians of the rounds."""
    if len(hosts) >= MANY:
        rounds = min(rounds, MOST_ROUNDS)
    times = [run(hosts, launcher, directory) for _ in range(rounds)]
    programs = {key for each in times for key in each.programs}
    middle = {key: median(each.programs.get(key, 0) for each in times) for key in programs}
    found = Times(median(each.wall for each in times), median(each.cpu for each in times), middle)
    print(f"{len(hosts)} hosts, {launcher}: {found.wall:.2f} s, processors {found.cpu:.2f} s")
    for part, count in ((FIRST, 1), (OTHERS, len(hosts) - 1)):
        rows = sorted(((1000 * spent / count, name) for (place, name), spent in middle.items() if place == part))
        shown = ", ".join(f"{name} {spent:.1f}" for spent, name in reversed(rows) if spent > LEAST)
        print(f"  {part}, ms of processor time by program: {shown}", flush=True)
    return found


def time_figures(launcher: str, times: Mapping[int, Times], floor: Mapping[int, Times]) -> list[Figure]:
    """Returns the figures of time: all hosts together, and each more host."""
    *_, before, most = times
    figures = [
        Figure(
            f"cluster-noop-{launcher}-{count}hosts",
            found.wall,
            "s",
            SECONDS.get(count) if launcher == MPI else None,
            floor[count].wall,
            "python-that-does-nothing",
        )
        for count, found in times.items()
    ]
    early, late = (rise(times, low, high) for low, high in ((min(times), before), (before, most)))
    goal = PROCESSOR_SECONDS if launcher == MPI else None
    return [*figures, Figure(f"cluster-cpu-{launcher}", late, "s/host", goal, early, f"up-to-{before}-hosts", GROWTH)]


def rise(times: Mapping[int, Times], low: int, high: int) -> float:
    """Returns the processor time of each host that one job has more than the other."""
    return (times[high].cpu - times[low].cpu) / (high - low)


def print_profile(floor: float) -> None:
    """Prints the processor time of the programs of a host. `floor`: for a Python that does nothing, in s."""
    programs = Path(sys.executable).parent
    python = str(programs / "python")
    alone = {
        "that Python": [python, "-I", "-S", "-c", "pass"],
        "Python of a script that does nothing": [python, "-c", "pass"],
        "imports of `train`, with Python": [str(programs / "train"), "--version"],
        "help of mpirun's daemon": ["env", "UCX_MEM_MMAP_HOOK_MODE=none", str(programs / "orted"), "--help"],
        "the same with UCX's memory hooks": [str(programs / "orted"), "--help"],
    }
    costs = "; ".join(f"{name} {1000 * processor_seconds(command):.0f}" for name, command in alone.items())
    print(f"profile, ms of processor time: a host with a Python that does nothing {1000 * floor:.0f}; {costs}")


def processor_seconds(command: Sequence[str]) -> float:
    """Returns the processor time of a command, the median of 20 runs. The first may write the bytecode of modules."""
    used = []
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    for _ in range(20):
        process = subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        _, _, found = os.wait4(process.pid, 0)
        process.returncode = 0  # it has ended
        used.append(found.ru_utime + found.ru_stime)
    return median(used)


def cost_figures(launcher: str, costs: Mapping[int, Costs]) -> list[Figure]:
    """Returns the figures of the first host for each more host."""
    (few, less), (many, more) = costs.items()
    kilobytes, files = ((more[part] - less[part]) / (many - few) for part in range(2))
    print(f"{launcher}: first host of {many}: {more.kilobytes / 1000:.1f} MB, {more.files:.0f} open files")
    at = MODELLED - many
    print(
        f"model, not measured: {launcher}: first host of {MODELLED}: "
        f"{(more.kilobytes + at * kilobytes) / 1000:.0f} MB, {more.files + at * files:.0f} open files"
    )
    return [
        Figure(f"cluster-memory-{launcher}", kilobytes, "KB/host", KILOBYTES),
        Figure(f"cluster-files-{launcher}", files, "files/host", FILES),
    ]


def check_model(launcher: str, times: Mapping[int, Times]) -> Figure:
    """Fits the processor times at all numbers of hosts but the last, and compares there."""
    *known, most = times
    line = fit({count: times[count].cpu for count in known})
    print(
        f"model, not measured: {launcher}: {line.alpha:.2f} s + {1000 * line.beta:.0f} ms per host of processor time; "
        f"{line(MODELLED):.0f} s for {MODELLED} hosts"
    )
    return Figure(f"cluster-model-{launcher}", errors(line, {most: times[most].cpu})[0], "relative-error", MODEL_ERROR)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
