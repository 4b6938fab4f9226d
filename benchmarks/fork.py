"""Ranks that are forked after one import, against torchrun: `make bench-fork`.

The same script runs in 8 ranks on this machine, without a container: under `train`, with its launchers for torchrun and
mpirun, and under torchrun. It imports torch, joins the process group (gloo)
and ends. Times count from the start of the command until the last rank has joined, and to the end of the command. The
memory is the sum of the ranks' proportional set size (PSS) while all of them have joined. `processor` is the processor
time of all processes, which other load on the machine changes least. Figures are medians of the
rounds, the two sides in turn.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from report import Figure, finish, make_parser, print_machine

RANKS = 8
IMPORTED = "torch, torch.distributed, torch.nn.parallel, torch.utils.data"
CEILING = 0.25
LAUNCHERS = {"fork": "sagemaker_torch_distributed_enabled", "fork-mpirun": "sagemaker_mpi_enabled"}
SET_CHILD_SUBREAPER = 36  # of prctl
MB = 1e6
KB = 1024
TRAIN = Path(sys.executable).with_name("train")
SCRIPT = """\
import os, sys, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
joined = time.time()
dist.barrier()
lines = open("/proc/self/smaps_rollup").read().splitlines()
pss = next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
dist.barrier()
with open(os.path.join(os.environ["FIGURES"], os.environ["RANK"]), "w") as file:
    file.write(f"{joined} {pss}")
dist.destroy_process_group()
"""


class Measured(NamedTuple):
    """Of one run: seconds until all ranks have joined and until the end, bytes of all ranks, and processor seconds."""

    joined: float
    ended: float
    memory: float
    processor: float


def main(arguments: Sequence[str]) -> int:
    """Run both sides in turn, and print the figures."""
    options = make_parser(__doc__, 5)
    options.add_argument("--ranks", type=int, default=RANKS, help="ranks of the host (%(default)s)")
    chosen = options.parse_args(arguments)
    print_machine()
    with tempfile.TemporaryDirectory() as directory:
        base = Path(directory)
        for name in ("code", "input/config"):
            (base / name).mkdir(parents=True)
        script = base / "code" / "train.py"
        script.write_text(SCRIPT)
        torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={chosen.ranks}")
        rounds: dict[str, list[Measured]] = {name: [] for name in (*LAUNCHERS, "rival")}
        for _ in range(chosen.rounds):
            for name, key in LAUNCHERS.items():
                configure(base, key, chosen.ranks)
                rounds[name].append(measure((str(TRAIN),), base))
            rounds["rival"].append(measure((*torchrun, str(script)), base))
    rival = rounds.pop("rival")
    imports = measure_imports()
    for name, ours in rounds.items():
        rest = statistics.median(each.processor for each in ours) - imports
        print(f"profile, s of processor time: {name}: the imports {imports:.2f}, each rank {rest / chosen.ranks:.2f}")
    return finish(
        [
            make_figure(f"{name}-{chosen.ranks}-{field}", field, ours, rival)
            for name, ours in rounds.items()
            for field in Measured._fields
        ]
    )


def configure(base: Path, launcher: str, ranks: int) -> None:
    """Write the hyperparameters of a job."""
    given = {launcher: True, "sagemaker_program": "train.py", "sagemaker_mpi_num_of_processes_per_host": ranks}
    (base / "input" / "config" / "hyperparameters.json").write_text(json.dumps(given))


def make_figure(name: str, field: str, ours: Sequence[Measured], rival: Sequence[Measured]) -> Figure:
    """Make the figure of a field of `Measured`."""
    divisor, unit = (MB, "MB") if field == "memory" else (1, "s")
    own, other = ([getattr(each, field) / divisor for each in side] for side in (ours, rival))
    return Figure(name, statistics.median(own), unit, None, statistics.median(other), "torchrun", CEILING, own, other)


def measure(command: Sequence[str], base: Path) -> Measured:
    """Run a command once. Raises CalledProcessError if it fails."""
    ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # processes that are left over count too
    with tempfile.TemporaryDirectory() as figures:
        used = processor_seconds()
        variables = {"SAGEMAKER_BASE_DIR": str(base), "FIGURES": figures, "OMP_NUM_THREADS": "1"}
        began = time.time()
        subprocess.run(command, env={**os.environ, **variables}, check=True, stdout=subprocess.DEVNULL)
        ended = time.time()
        used = processor_seconds() - used
        rows = [tuple(map(float, path.read_text().split())) for path in Path(figures).iterdir()]
    return Measured(max(row[0] for row in rows) - began, ended - began, sum(row[1] for row in rows) * KB, used)


def measure_imports() -> float:
    """Returns the processor time of a Python that imports what the standby imports for the script."""
    used = processor_seconds()
    subprocess.run([sys.executable, "-c", f"import {IMPORTED}"], check=True)
    return processor_seconds() - used


def processor_seconds() -> float:
    """Returns the processor time of all child processes so far. Waits for those that still run."""
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
