"""The cost of `shoal run`'s live view, and of the usage that it measures for report.html: `make bench-live`.

Each round runs the same job without Docker on a pseudo terminal, in three ways, one after the other:

- live: `shoal run`, with the live view;
- plain: `shoal run --plain`;
- unmeasured: `shoal run --plain` that measures no CPU, memory and GPUs.

The script computes on all cores, and prints about 20 lines per second and core. It measures the time of its own loop,
so the start of the job does not count. `cpu` is the processor time of `shoal` that is added, per second of the job.
`lines` is a script that only prints, as fast as it can: from its first line to its last one on the terminal.
"""

from __future__ import annotations

import json
import os
import pty
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from report import Figure, finish, make_parser, print_machine

ROUNDS = 5
CEILING = 1.01
PERCENT = 10  # ms/s: of one core
LINES = 200_000
CODE = "from shoal.cli import main; main()"
UNMEASURED = f"import contextlib, shoal.jobs.usage as u; u.sample_usage = lambda *_: contextlib.nullcontext(); {CODE}"
WAYS = {"live": (CODE, []), "plain": (CODE, ["--plain"]), "unmeasured": (UNMEASURED, ["--plain"])}
COMPUTE = """
import json, multiprocessing, sys, time
def compute(rank):
    for step in range(int(sys.argv[2])):
        total = 0
        for number in range(500_000):
            total += number * number
        print(f"log: rank={rank} step={step} loss={1 / (step + 1):.4f} examples_per_second={total % 1000}", flush=True)
began = time.monotonic()
processes = [multiprocessing.Process(target=compute, args=(rank,)) for rank in range(multiprocessing.cpu_count())]
for process in processes:
    process.start()
for process in processes:
    process.join()
json.dump(time.monotonic() - began, open(sys.argv[1], "w"))
"""
PRINT = """
import json, sys, time
began = time.monotonic()
for step in range(int(sys.argv[2])):
    sys.stdout.write("log: step %d: loss 0.12345, 123.4 images/s, and more, to make it 70 long\\n" % step)
sys.stdout.flush()
json.dump(time.monotonic() - began, open(sys.argv[1], "w"))
"""


class Run(NamedTuple):
    """The times of a job."""

    script_seconds: float
    shoal_share: float
    """Processor time of `shoal` itself while the script runs, per second."""
    lines_seconds: float
    """From the first line of the script to the last on the terminal."""


def main(arguments: Sequence[str]) -> int:
    """Measure, and return the exit code."""
    parser = make_parser(__doc__, ROUNDS)
    parser.add_argument(
        "--steps", type=int, default=300, metavar="N", help="steps of the computing script (%(default)s)"
    )
    options = parser.parse_args(arguments)
    print_machine()
    print(
        f"{options.steps} steps and {LINES:,} lines, rounds: {options.rounds} (medians), load: {os.getloadavg()[0]:.1f}"
    )
    computed: dict[str, list[Run]] = {way: [] for way in WAYS}
    printed: dict[str, list[Run]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as directory:
        for _ in range(options.rounds):
            for way in WAYS:
                computed[way].append(run(Path(directory), way, COMPUTE, options.steps))
                printed[way].append(run(Path(directory), way, PRINT, LINES))
    for way, runs in computed.items():
        seconds = [each.script_seconds for each in runs]
        print(f"{way}: {min(seconds):.3f} .. {max(seconds):.3f} s")
    script = {way: statistics.median(each.script_seconds for each in runs) for way, runs in computed.items()}
    share = {way: statistics.median(each.shoal_share for each in runs) * 1000 for way, runs in computed.items()}
    lines = {way: statistics.median(each.lines_seconds for each in runs) for way, runs in printed.items()}
    return finish(
        [
            Figure("live-view", script["live"], "s", None, script["plain"], "plain", CEILING),
            Figure("live-view-cpu", share["live"] - share["plain"], "ms/s", PERCENT),
            Figure("report-usage", script["plain"], "s", None, script["unmeasured"], "unmeasured", CEILING),
            Figure("report-usage-cpu", share["plain"] - share["unmeasured"], "ms/s", PERCENT),
            Figure(f"live-view-{LINES}-lines", lines["live"], "s", None, lines["plain"], "plain"),
        ]
    )


def run(directory: Path, way: str, script: str, count: int) -> Run:
    """Run a job on a pseudo terminal of 100 columns, and read all that it prints."""
    result = directory / "seconds.json"
    (directory / "code").mkdir(exist_ok=True)
    (directory / "code" / "script.py").write_text(script)
    code, options = WAYS[way]
    words = ["run", "any:1", "code/script.py", "--local", *options, "--", str(result), str(count)]
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(directory)
        removed = ("CI", "NO_COLOR")
        environment = {name: value for name, value in os.environ.items() if name not in removed}
        shape = {"TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30"}
        os.execve(sys.executable, [sys.executable, "-c", code, *words], {**environment, **shape})
    times: list[tuple[float, float]] = []  # of the first and the last lines: now, and the processor time of `shoal`
    while data := read(terminal):
        if b"log: " in data:
            times = [*times[:1], (time.monotonic(), processor_seconds(pid))]
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    if status or len(times) < 2:
        raise SystemExit(f"{way}: the job failed with exit code {os.waitstatus_to_exitcode(status)}")
    (began, cpu_before), (ended, cpu_after) = times
    return Run(json.loads(result.read_text()), (cpu_after - cpu_before) / (ended - began), ended - began)


def read(terminal: int) -> bytes:
    """Return the next bytes of a terminal; none if all programs on it have ended."""
    try:
        return os.read(terminal, 1 << 16)
    except OSError:
        return b""


def processor_seconds(pid: int) -> float:
    """Return the processor time of a process, without its children."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
