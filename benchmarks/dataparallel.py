"""Collectives and a training step on `smddp` against gloo and MPI, in one run: `make bench-dataparallel`.

The figures are medians of the rounds. In each round the libraries take turns, after a barrier, and the slowest rank
counts. Below 1 MB a round has 50 calls without a pause, and their mean counts. Ranks have one thread each, on one host.
MPI is Open MPI's Allreduce through mpi4py, on the same memory.

- `all-reduce-SIZE-Nranks`: float32, SIZE bytes, against gloo. `…-mpi` is against MPI.
- `all-reduce-64MB-2ranks-copies`: against two copies of the same size;
- `engine-SIZE-Nranks-mpi`: our communication engine without torch.distributed, against MPI;
- `all-gather-64MB`, `reduce-scatter-64MB`: 64 MB in all, 2 ranks;
- `ddp-mlp`: a step of DistributedDataParallel over an MLP of 50 million parameters, 2 ranks;
- `ddp-mlp-least`: such a step without reduction, against gloo's step: the limit of any speed-up;
- `ddp-cnn`: a step of a CNN, 64 images of 32 × 32 a rank, against the same ranks without reduction (`no_sync`);
- `timeline-cnn`: 20 steps of the CNN with a timeline, from its start to its end, against the same steps without;
- `timeline-100-layers`: the same of 100 layers of width 64;
- `init`: from the start of the process to the end of the first all_reduce, 2 ranks, the import of torch included.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from statistics import median

from report import Figure, finish, make_parser, mpirun, print_machine

ROUNDS = 20
RANKS = Path(__file__).with_name("dataparallel_ranks.py")
SIZES = {1 << 10: "1KB", 16 << 10: "16KB", 256 << 10: "256KB", 1 << 20: "1MB", 16 << 20: "16MB", 64 << 20: "64MB"}
SMALL = 256 << 10


def main(arguments: list[str]) -> int:
    """Measure, and print the figures."""
    rounds = make_parser(__doc__, ROUNDS).parse_args(arguments).rounds
    print_machine()
    two, four = measure(2, rounds), measure(4, rounds)
    figures = [*all_reduces(two, 2), *all_reduces(four, 4), *others(two), *starts(rounds)]
    return finish(figures)


def measure(ranks: int, rounds: int, sizes: Iterable[int] = SIZES) -> dict[str, dict[str, float]]:
    """Run the ranks; returns seconds by case and library. With one size, only all_reduce is measured."""
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory, "times.json")
        subprocess.run(mpirun(ranks, RANKS, out, rounds, *sizes), env=environment(), check=True)
        measured: dict[str, dict[str, float]] = json.loads(out.read_text())
    for case, times in measured.items():
        listed = ", ".join(f"{engine} {1000 * seconds:.3f}" for engine, seconds in times.items())
        print(f"{ranks} ranks, {case}: {listed} ms", flush=True)
    return measured


def all_reduces(measured: dict[str, dict[str, float]], ranks: int) -> list[Figure]:
    """The figures of all_reduce."""
    figures = []
    for size, name in SIZES.items():
        times = {engine: 1000 * seconds for engine, seconds in measured[f"all-reduce-{size}"].items()}
        ours, case = times["smddp"], f"all-reduce-{name}-{ranks}ranks"
        if ranks == 2 or name == "64MB":
            goal = 1 / 10 if size <= SMALL else 1 / 4
            mpi = 1.3 if ranks == 2 else 1 / 1.5
            engine = times["engine"]
            figures += [
                Figure(f"engine-{name}-{ranks}ranks-mpi", engine, "ms", rival=times["mpi"], rival_name="MPI_Allreduce"),
                Figure(case, ours, "ms", rival=times["gloo"], rival_name="gloo", ceiling=goal),
                Figure(f"{case}-mpi", ours, "ms", rival=times["mpi"], rival_name="MPI_Allreduce", ceiling=mpi),
            ]
    if ranks == 2:
        copies = 1000 * measured["copies"]["smddp"]
        figures.append(Figure(f"{case}-copies", ours, "ms", rival=copies, rival_name="two-copies", ceiling=1.5))
    return figures


def others(measured: dict[str, dict[str, float]]) -> list[Figure]:
    """The other collectives, and the step."""
    ceilings = {"all-gather-64MB": 1 / 3, "reduce-scatter-64MB": 1 / 3, "ddp-mlp": 1 / 2}
    figures = [
        Figure(case, 1000 * times["smddp"], "ms", rival=1000 * times["gloo"], rival_name="gloo", ceiling=ceiling)
        for case, ceiling in ceilings.items()
        for times in [measured[case]]
    ]
    cnn, mlp = ({name: 1000 * seconds for name, seconds in measured[case].items()} for case in ("ddp-cnn", "ddp-mlp"))
    return [
        *figures,
        Figure("ddp-mlp-least", mlp["no_sync"], "ms", rival=mlp["gloo"], rival_name="gloo"),
        Figure("ddp-cnn", cnn["smddp"], "ms", rival=cnn["no_sync"], rival_name="no_sync", ceiling=1 / 0.97),
        *(
            Figure(case, 1000 * times["on"], "ms", rival=1000 * times["off"], rival_name="off", ceiling=1.1)
            for case, times in measured.items()
            if case.startswith("timeline-")
        ),
    ]


def starts(rounds: int) -> list[Figure]:
    """From nothing to the first all_reduce."""
    times: dict[str, list[float]] = {"smddp": [], "gloo": []}
    for _ in range(max(3, rounds // 2)):
        for backend, found in times.items():
            found.append(measure_start(backend))
    ours, gloo = median(times["smddp"]), median(times["gloo"])
    return [Figure("init", ours, "s", rival=gloo, rival_name="gloo", ceiling=1.0)]


def measure_start(backend: str) -> float:
    """Start two ranks, and return how many seconds the slower one took."""
    common, pipe = environment(), subprocess.PIPE
    ranks = [
        subprocess.Popen(
            [sys.executable, RANKS, "start", backend],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"},
            stdout=pipe,
        )
        for rank in range(2)
    ]
    return max(float(rank.communicate()[0]) for rank in ranks)


def environment() -> dict[str, str]:
    """The variables of ranks with a thread each, which meet at a port that is free."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    return {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
