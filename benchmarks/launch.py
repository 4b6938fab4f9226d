"""How fast `train` launches, against the stock toolkit in an image of its own: `make bench-launch`.

The scripts do nothing. Figures are medians of the rounds, with the exceptions below:

- `train-noop`: the command `train` from its start to its end, in a container that runs already;
- `launch-1host-2ranks`, `launch-2hosts-1rank`: MPI jobs, as SageMaker starts them. Time is from the start of the last
  container until all have ended (State.StartedAt and FinishedAt). Docker's work on containers and networks does not
  count. `with-engine` counts it, from the request to start the first container. `against-floor` compares with `mpirun`
  alone in one container. `until-first-rank` is `launch_seconds` of our output/job.json;
- `rank-failure-2hosts`: from the moment in which a rank fails until both containers have ended;
- `rank-with-ddp`: the processor time of a rank that imports torch and Dynamo, as DistributedDataParallel does, and
  ends. The rival is the same rank with SHOAL_FAST_IMPORTS=0;
- `launcher-memory`: the most resident memory (VmHWM) of the `train` of an MPI job, when its ranks run;
- `installed-size`: the files of our toolkit, and of the stock one with all that it requires, Python and the framework
  aside. The packages for code on S3 (boto3) are a row of their own.

The stock toolkit runs without a framework toolkit, which would import its framework first. It sleeps for half a minute
after each MPI job: those jobs run three times, beside each other while nothing else is measured. Its workers miss a job
that is shorter than a second, so on two hosts its script takes two, which are subtracted. Its rank failure is measured
once.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import docker
from jobs import CODE, WITHOUT_FRAMEWORK, Job, Ran, create, moment, run, wait, write_tree
from report import Figure, finish, make_parser, print_machine

from shoal.matrix import project
from shoal.matrix.spec import load

ROUNDS = 10
STOCK_ROUNDS = 3
ORACLE = Path(__file__).resolve().parents[1] / "tests" / "conformance" / "oracle.py"
MB = 1e6
MPIRUN = "mpirun --allow-run-as-root --oversubscribe -np 2 python -m mpi4py"
NOTHING = ""
STOCK_SECONDS = 2.0
TWO_SECONDS = f"import time; time.sleep({STOCK_SECONDS})"
FAILURE = """\
import os, pathlib, sys, time
rank, there = os.environ["OMPI_COMM_WORLD_RANK"], pathlib.Path(os.environ["SM_OUTPUT_DATA_DIR"])
time.sleep(3)  # the other rank runs, and the stock toolkit's worker has seen it
if rank == "1":
    (there / "failed").write_text(repr(time.time()))
    sys.exit(3)
time.sleep(600)
"""
MEMORY = """\
import os, pathlib, re
pid, most = os.getpid(), 0
while pid:
    process = pathlib.Path("/proc", str(pid))
    status = (process / "status").read_text()
    if (process / "cmdline").read_bytes().split(b"\\0")[1].endswith(b"/train"):
        most = max(most, int(re.search(r"VmHWM:\\s+(\\d+)", status)[1]))
    pid = int(re.search(r"PPid:\\s+(\\d+)", status)[1])
pathlib.Path(os.environ["SM_OUTPUT_DATA_DIR"], "kib").write_text(str(most))
"""
# Runs in a container: `train`, as often as the argument says.
TIMES = """\
import subprocess, sys, time
for _ in range(int(sys.argv[1]) + 1):
    start = time.perf_counter()
    subprocess.run(["train"], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    print(time.perf_counter() - start)
"""
# Runs in a container: the processor time of ranks that import torch, as the first argument says, and Dynamo.
RANKS = """\
import os, resource, subprocess, sys
rank = {**os.environ, "SM_CURRENT_HOST": "algo-1", "SHOAL_FAST_IMPORTS": sys.argv[1]}
def seconds():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
for _ in range(int(sys.argv[2]) + 1):
    before = seconds()
    subprocess.run([sys.executable, "-c", "import torch, torch._dynamo"], check=True, env=rank)
    print(seconds() - before)
"""
# Runs in a container: the bytes of a distribution and of all that it requires.
SIZES = """\
import importlib.metadata as metadata, json, pathlib, re, sys
def needs(name, found):
    try:
        dist = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return found
    if dist.name.lower() not in found:
        found[dist.name.lower()] = dist
        for line in dist.requires or ():
            if "extra ==" not in line:
                needs(re.match(r"[\\w.-]+", line)[0], found)
    return found
def size(dist):
    paths = {pathlib.Path(file.locate()).resolve() for file in dist.files or ()}
    return sum(path.stat().st_size for path in paths if path.is_file())
print(json.dumps(sum(size(dist) for dist in needs(sys.argv[1], {}).values())))
"""


def main(arguments: Sequence[str]) -> int:
    """Measure the image, and return the exit code."""
    parser = make_parser(__doc__, ROUNDS)
    parser.add_argument("--image", default="pytorch", help="as `shoal build` takes it (%(default)s)")
    options = parser.parse_args(arguments)
    client = docker.from_env()
    ours, rounds = resolve(options.image), options.rounds
    stock = oracle(ours)
    print_machine()
    print(f"Docker: {client.version()['Version']}, image: {ours}, stock: {stock}, rounds: {rounds} (medians)")
    with ThreadPoolExecutor(4) as pool:
        theirs = measure_stock(client, stock, pool, rounds)
    return finish(figures(theirs, measure_ours(client, ours, rounds)))


def figures(stock: dict[str, float], ours: dict[str, float]) -> Iterable[Figure]:
    """Return a figure for each row, with its goal."""

    def against_stock(name: str, unit: str, goal: float, ceiling: float | None = None) -> Figure:
        return Figure(name, ours[name], unit, goal, stock[name], "stock", ceiling)

    yield against_stock("train-noop", "s", 0.060, ceiling=1 / 7)
    yield against_stock("launch-1host-2ranks", "s", 0.4)
    yield against_stock("launch-2hosts-1rank", "s", 1.5)
    yield against_stock("rank-failure-2hosts", "s", 3)
    yield against_stock("launcher-memory", "MB", 20)
    yield against_stock("installed-size", "MB", 1)
    usual = ours["rank-with-ddp-usual"]
    yield Figure("rank-with-ddp", ours["rank-with-ddp"], "s", None, usual, "SHOAL_FAST_IMPORTS=0", ceiling=0.8)
    floor = ours["bare-mpirun"]
    yield Figure("launch-1host-2ranks-against-floor", ours["launch-1host-2ranks"], "s", None, floor, "bare-mpirun")
    for name in ("launch-1host-2ranks", "launch-2hosts-1rank"):
        yield Figure(f"{name}-with-engine", ours[f"{name}-with-engine"], "s")
        yield Figure(f"{name}-until-first-rank", ours[f"{name}-until-first-rank"], "s")
    yield Figure("installed-size-of-boto3", ours["boto3"], "MB")


def resolve(name: str) -> str:
    """Return the tag of an image: a tag as it is, else what the build specification has for that name."""
    return name if ":" in name else load(project.find(Path.cwd()).buildspec).select(name).tag


def oracle(image: str) -> str:
    """Return the tag of the stock toolkit's image, which extends our image. Build it if it is missing."""
    command = [sys.executable, str(ORACLE), image]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def measure_stock(client: Any, image: str, pool: ThreadPoolExecutor, rounds: int) -> dict[str, float]:
    """Measure the stock toolkit. Figures that need the whole machine come first."""
    figures = {
        "train-noop": median("train-noop", "stock", commands(client, image, TIMES, rounds)),
        "installed-size": installed(client, image, "sagemaker-training"),
    }
    failing = pool.submit(failure, image)
    memory = pool.submit(peak, image)
    spans: dict[str, list[float]] = {}
    for _ in range(STOCK_ROUNDS):
        one = pool.submit(job, Job(image, NOTHING, ranks=2))
        two = pool.submit(job, Job(image, TWO_SECONDS, hosts=2, ranks=1))
        for name, future in (("launch-1host-2ranks", one), ("launch-2hosts-1rank", two)):
            spans.setdefault(name, []).append(future.result().span)
    figures |= {name: median(name, "stock", values) for name, values in spans.items()}
    figures["launch-2hosts-1rank"] -= STOCK_SECONDS
    return figures | {"rank-failure-2hosts": failing.result(), "launcher-memory": memory.result()}


def measure_ours(client: Any, image: str, rounds: int) -> dict[str, float]:
    """Measure our toolkit, one job after the other."""
    figures = {
        "train-noop": median("train-noop", "ours", commands(client, image, TIMES, rounds)),
        "rank-with-ddp": median("rank-with-ddp", "ours", commands(client, image, RANKS, 1, rounds)),
        "rank-with-ddp-usual": median("rank-with-ddp", "usual", commands(client, image, RANKS, 0, rounds)),
        "installed-size": installed(client, image, "shoal-toolkit"),
        "boto3": installed(client, image, "boto3"),
        "launcher-memory": peak(image),
    }
    values: dict[str, list[float]] = {}
    for _ in range(rounds):
        values.setdefault("bare-mpirun", []).append(bare(client, image))
        values.setdefault("rank-failure-2hosts", []).append(failure(image))
        for name, hosts, ranks in (("launch-1host-2ranks", 1, 2), ("launch-2hosts-1rank", 2, 1)):
            ran = job(Job(image, NOTHING, hosts, ranks))
            values.setdefault(name, []).append(ran.span)
            values.setdefault(f"{name}-with-engine", []).append(max(ran.finished) - ran.requested)
            first_rank = float(ran.reports[0]["launch_seconds"])
            values.setdefault(f"{name}-until-first-rank", []).append(first_rank)
    return figures | {name: median(name, "ours", measured) for name, measured in values.items()}


def median(name: str, side: str, values: Sequence[float]) -> float:
    """Print the spread and return the median."""
    print(f"{name} ({side}): {min(values):.3f} .. {max(values):.3f} s, {len(values)} rounds", flush=True)
    return statistics.median(values)


def job(described: Job) -> Ran:
    """Run a job with a Docker client of its own: each thread needs one."""
    return run(docker.from_env(timeout=600), described)


def commands(client: Any, image: str, program: str, *arguments: int) -> list[float]:
    """Return the seconds that a Python program prints in a container, without the first, which warms the disk cache."""
    with tempfile.TemporaryDirectory() as directory, ExitStack() as undo:
        tree = write_tree(Path(directory) / "ml", Job(image, NOTHING), "algo-1")
        command = ["python", "-c", program, *map(str, arguments)]
        container = create(client, image, tree, undo, None, "algo-1", WITHOUT_FRAMEWORK, entrypoint="", command=command)
        container.start()
        wait([container])
        return [float(line) for line in container.logs(stderr=False).split()][1:]


def bare(client: Any, image: str) -> float:
    """Time mpirun alone."""
    with tempfile.TemporaryDirectory() as directory, ExitStack() as undo:
        tree = write_tree(Path(directory) / "ml", Job(image, NOTHING), "algo-1")
        command = ["sh", "-c", f"{MPIRUN} {CODE}/script.py"]
        container = create(client, image, tree, undo, None, "algo-1", {}, entrypoint="", command=command)
        container.start()
        wait([container])
        return moment(container, "FinishedAt") - moment(container, "StartedAt")


def failure(image: str) -> float:
    """Time the end of a job in which a rank fails, from that moment on."""
    ran = job(Job(image, FAILURE, hosts=2, ranks=1, exit_code=None))
    failed = next(float(output["data/failed"]) for output in ran.outputs if "data/failed" in output)
    if any("success" in output for output in ran.outputs):
        print(f"a rank failed, and a host reports a success: {image}", flush=True)
    return max(ran.finished) - failed


def peak(image: str) -> float:
    """Return the most resident memory of `train` on the first host of an MPI job, in MB."""
    return int(job(Job(image, MEMORY, ranks=1)).outputs[0]["data/kib"]) * 1024 / MB


def installed(client: Any, image: str, name: str) -> float:
    """Return the size of a distribution and all that it requires, in MB."""
    return float(json.loads(client.containers.run(image, ["python", "-c", SIZES, name], remove=True))) / MB


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
