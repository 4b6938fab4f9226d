"""How fast `train` launches, against the stock toolkit in an image of its own: `make bench-launch`.

The scripts do nothing. A figure is the median of its rounds. `rounds` and `range` behind it are their number, the least
and the most:

- `train-noop`: the command `train` from its start to its end, in a container that runs already;
- `launch-1host-2ranks`, `launch-2hosts-1rank`: MPI jobs, as SageMaker starts them. Time is from the start of the last
  container until all have ended (State.StartedAt and FinishedAt). Docker's work on containers and networks does not
  count. `with-engine` counts it, from the request to start the first container. `against-floor` compares with `mpirun`
  alone in one container. `until-first-rank` is `launch_seconds` of our output/job.json. `without-sleep` subtracts
  the stock toolkit's fixed sleep after the training. The length of the sleep is read from its source in the image;
- `rank-failure-2hosts`: from the moment in which a rank fails until both containers have ended;
- `rank-with-ddp`: the processor time of a rank that imports torch and Dynamo, as DistributedDataParallel does, and
  ends. The rival is the same rank with SHOAL_FAST_IMPORTS=0;
- `launcher-memory`: the most resident memory (VmHWM) of the `train` of an MPI job, when its ranks run;
- `installed-size`: the files of our toolkit, and of the stock one with all that it requires, Python and the framework
  aside. The packages for code on S3 (boto3) are a row of their own.

The stock toolkit runs without a framework toolkit, which would import its framework first. Because of its sleep, its
MPI jobs run three times, beside each other while nothing else is measured. Its workers miss a job that is shorter than
a second, so on two hosts its script takes two, which are subtracted. Its rank failure, memory and sizes are measured
once: `rival_rounds=1`.
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
from dataclasses import replace
from pathlib import Path
from typing import Any

import docker
from jobs import CODE, WITHOUT_FRAMEWORK, Job, Ran, create, moment, run, wait, write_tree
from report import Figure, finish, make_parser, print_machine

from shoal.matrix import project
from shoal.matrix.spec import load

Rounds = dict[str, list[float]]
"""The values of each figure."""
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
# Runs in a container: the seconds that the stock toolkit sleeps after each MPI job, on the first host.
SLEEP = """\
import ast, inspect, textwrap
from sagemaker_training import mpi
(run,) = ast.parse(textwrap.dedent(inspect.getsource(mpi.MasterRunner.run))).body
sleeps = [step.value for step in run.body if isinstance(step, ast.Expr) and isinstance(step.value, ast.Call)]
print(sum(call.args[0].value for call in sleeps if ast.unparse(call.func) == "time.sleep"))
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
    print(f"Docker: {client.version()['Version']}, image: {ours}, stock: {stock}, rounds: {rounds}")
    with ThreadPoolExecutor(4) as pool:
        theirs = measure_stock(client, stock, pool, rounds)
    return finish(figures(theirs, measure_ours(client, ours, rounds)))


def figures(stock: Rounds, ours: Rounds) -> Iterable[Figure]:
    """Return a figure for each row, with its goal."""

    def figure(
        name: str,
        unit: str = "s",
        goal: float | None = None,
        rival: Sequence[float] = (),
        rival_name: str = "stock",
        ceiling: float | None = None,
    ) -> Figure:
        between = statistics.median(rival) if rival else None
        return Figure(name, statistics.median(ours[name]), unit, goal, between, rival_name, ceiling, ours[name], rival)

    yield figure("train-noop", "s", 0.1, stock["train-noop"], ceiling=1 / 3)
    (sleep,) = stock["sleep"]
    for name, goal in (("launch-1host-2ranks", 0.4), ("launch-2hosts-1rank", 1.5)):
        yield figure(name, "s", goal, stock[name])
        awake = [seconds - sleep for seconds in stock[name]]
        yield replace(figure(name, "s", None, awake, "stock-without-sleep"), name=f"{name}-without-sleep")
    for name, unit, goal in (
        ("rank-failure-2hosts", "s", 3),
        ("launcher-memory", "MB", 20),
        ("installed-size", "MB", 1),
    ):
        yield figure(name, unit, goal, stock[name])
    yield figure("rank-with-ddp", rival=ours["rank-with-ddp-usual"], rival_name="SHOAL_FAST_IMPORTS=0", ceiling=0.8)
    floor = figure("launch-1host-2ranks", rival=ours["bare-mpirun"], rival_name="bare-mpirun")
    yield replace(floor, name="launch-1host-2ranks-against-floor")
    for name in ("launch-1host-2ranks", "launch-2hosts-1rank"):
        yield figure(f"{name}-with-engine")
        yield figure(f"{name}-until-first-rank")
    yield figure("installed-size-of-boto3", "MB")


def resolve(name: str) -> str:
    """Return the tag of an image: a tag as it is, else what the build specification has for that name."""
    return name if ":" in name else load(project.find(Path.cwd()).buildspec).select(name).tag


def oracle(image: str) -> str:
    """Return the tag of the stock toolkit's image, which extends our image. Build it if it is missing."""
    command = [sys.executable, str(ORACLE), image]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def measure_stock(client: Any, image: str, pool: ThreadPoolExecutor, rounds: int) -> Rounds:
    """Measure the stock toolkit. Figures that need the whole machine come first."""
    found: Rounds = {
        "train-noop": commands(client, image, TIMES, rounds),
        "installed-size": [installed(client, image, "sagemaker-training")],
        "sleep": [float(client.containers.run(image, ["python", "-c", SLEEP], remove=True))],
    }
    failing = pool.submit(failure, image)
    memory = pool.submit(peak, image)
    for _ in range(STOCK_ROUNDS):
        one = pool.submit(job, Job(image, NOTHING, ranks=2))
        two = pool.submit(job, Job(image, TWO_SECONDS, hosts=2, ranks=1))
        found.setdefault("launch-1host-2ranks", []).append(one.result().span)
        found.setdefault("launch-2hosts-1rank", []).append(two.result().span - STOCK_SECONDS)
    return found | {"rank-failure-2hosts": [failing.result()], "launcher-memory": [memory.result()]}


def measure_ours(client: Any, image: str, rounds: int) -> Rounds:
    """Measure our toolkit, one job after the other."""
    found: Rounds = {
        "train-noop": commands(client, image, TIMES, rounds),
        "rank-with-ddp": commands(client, image, RANKS, 1, rounds),
        "rank-with-ddp-usual": commands(client, image, RANKS, 0, rounds),
        "installed-size": [installed(client, image, "shoal-toolkit")],
        "installed-size-of-boto3": [installed(client, image, "boto3")],
        "launcher-memory": [peak(image)],
    }
    for _ in range(rounds):
        found.setdefault("bare-mpirun", []).append(bare(client, image))
        found.setdefault("rank-failure-2hosts", []).append(failure(image))
        for name, hosts, ranks in (("launch-1host-2ranks", 1, 2), ("launch-2hosts-1rank", 2, 1)):
            ran = job(Job(image, NOTHING, hosts, ranks))
            found.setdefault(name, []).append(ran.span)
            found.setdefault(f"{name}-with-engine", []).append(max(ran.finished) - ran.requested)
            first_rank = float(ran.reports[0]["launch_seconds"])
            found.setdefault(f"{name}-until-first-rank", []).append(first_rank)
    return found


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
