"""The cost of the log: 1,000,000 lines of a script through `train`, and through `cat`: `make bench-logs`.

Per round and case, one after the other, the same writer:

- ours: run by `train` (one process; one or two MPI ranks, the lines of two marked with rank and host);
- rival: run by a shell, piped through one `cat` (two writers at once for two ranks).

Time is from the first to the last byte that a reader of the pipe behind gets, so that the launch does not count; every
line is counted. Buffered: Python writes 8 KiB at a time. Unbuffered: each line on its own, the default under `train`.
`line-latency` is the other side of it: how long after a script wrote a line, 20 ms after the one before, it is read.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from report import Figure, finish, make_parser, print_machine

ROUNDS = 5
LINES = 1_000_000
CEILING = 1.5
WRITER = """
import os, sys
out = getattr(sys, os.environ["STREAM"])
for step in range(int(os.environ["LINES"])):
    out.write("step %d: loss 0.12345, 123.4 images/s\\n" % step)
"""
TICKER = """
import sys, time
for tick in range(100):
    sys.stdout.write("%.6f\\n" % time.monotonic())
    time.sleep(0.02)
"""


class Case(NamedTuple):
    """One way in which lines come. `ranks` 0: a process without MPI."""

    name: str
    ranks: int
    stream: str
    unbuffered: bool
    variables: Mapping[str, str] = {}
    ceiling: float | None = CEILING

    @property
    def writers(self) -> int:
        return max(1, self.ranks)


CASES = (
    Case("logs-process", 0, "stdout", False),
    Case("logs-process-unbuffered", 0, "stdout", True),
    Case("logs-process-stderr", 0, "stderr", True),
    Case("logs-1-rank", 1, "stdout", False),
    Case("logs-1-rank-unbuffered", 1, "stdout", True),
    Case("logs-2-ranks", 2, "stdout", False),
    Case("logs-2-ranks-unbuffered", 2, "stdout", True),
    Case("logs-2-ranks-json", 2, "stdout", True, {"SHOAL_LOG_FORMAT": "json"}, None),
)

TICKS = Case("line-latency", 1, "stdout", True)


def main(arguments: Sequence[str]) -> int:
    """Measure, and return the exit code."""
    rounds = make_parser(__doc__, ROUNDS).parse_args(arguments).rounds
    print_machine()
    print(f"{LINES:,} lines, rounds: {rounds} (medians)")
    seconds: dict[str, tuple[list[float], list[float]]] = {case.name: ([], []) for case in CASES}
    latencies: tuple[list[float], list[float]] = ([], [])
    with tempfile.TemporaryDirectory() as directory:
        base = Path(directory)
        for _ in range(rounds):
            for case in CASES:
                ours, rival = seconds[case.name]
                ours.append(duration(case, partial(train, base, case, WRITER)))
                rival.append(duration(case, partial(cat, base, case, WRITER)))
            latencies[0].append(latency(partial(train, base, TICKS, TICKER)))
            latencies[1].append(latency(partial(cat, base, TICKS, TICKER)))
    for name, (ours, rival) in seconds.items():
        print(f"{name}: {min(ours):.3f} .. {max(ours):.3f} s, cat {min(rival):.3f} .. {max(rival):.3f} s")
    figures = [
        Figure(case.name, median(0, seconds[case.name]), "s", None, median(1, seconds[case.name]), "cat", case.ceiling)
        for case in CASES
    ]
    return finish([*figures, Figure("line-latency", median(0, latencies), "ms", None, median(1, latencies), "cat")])


def median(index: int, values: tuple[list[float], list[float]]) -> float:
    return statistics.median(values[index])


def duration(case: Case, start: Callable[[int], subprocess.Popen[bytes]]) -> float:
    """Return the seconds from the first byte to the last; every line has to come."""
    lines, first, last = 0, 0.0, 0.0
    read, write = os.pipe()
    with start(write) as process:
        os.close(write)
        while data := os.read(read, 1 << 20):
            last = time.monotonic()
            first = first or last
            lines += data.count(b"\n")
    os.close(read)
    expected = LINES // case.writers * case.writers
    # `train` adds lines of its own if both share a stream.
    if process.returncode or not expected <= lines <= expected + 9 * (case.stream == "stderr" or bool(case.variables)):
        raise SystemExit(f"{case.name}: exit code {process.returncode}, {lines} lines instead of {expected}")
    return last - first


def latency(start: Callable[[int], subprocess.Popen[bytes]]) -> float:
    """Return the milliseconds from the writing of a line to its arrival; the median of many."""
    late = []
    read, write = os.pipe()
    with start(write), os.fdopen(read, "rb", buffering=0) as lines:
        os.close(write)
        for line in lines:
            late.append((time.monotonic() - float(line)) * 1000)
    return statistics.median(late)


def train(base: Path, case: Case, script: str, fd: int) -> subprocess.Popen[bytes]:
    """Start a script through `train`, the stream that counts into a descriptor."""
    write_script(base, script)
    mpi = {"sagemaker_mpi_enabled": "true", "sagemaker_mpi_num_of_processes_per_host": str(case.ranks)}
    config = {"sagemaker_program": '"writer.py"', **(mpi if case.ranks else {})}
    (base / "input" / "config").mkdir(parents=True, exist_ok=True)
    (base / "input" / "config" / "hyperparameters.json").write_text(json.dumps(config))
    command = [sys.executable, "-m", "shoal_toolkit"]
    variables = {**case.variables, "SAGEMAKER_BASE_DIR": str(base)}
    out, err = (subprocess.DEVNULL, fd) if case.stream == "stderr" else (fd, subprocess.DEVNULL)
    return subprocess.Popen(command, env=environment(case, **variables), stdout=out, stderr=err)


def cat(base: Path, case: Case, script: str, fd: int) -> subprocess.Popen[bytes]:
    """Start the same script through `cat`."""
    writer = f"{sys.executable} {write_script(base, script)}"
    writer += " 2>&1 >/dev/null" if case.stream == "stderr" else ""
    command = " & ".join([writer] * case.writers)
    shell = ["/bin/sh", "-c", f"({command}{' & wait' if case.writers > 1 else ''}) | cat"]
    return subprocess.Popen(shell, env=environment(case), stdout=fd)


def write_script(base: Path, script: str) -> Path:
    path = base / "code" / "writer.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(script)
    return path


def environment(case: Case, **more: str) -> dict[str, str]:
    unbuffered = "1" if case.unbuffered else ""
    lines = str(LINES // case.writers)
    return {**os.environ, "PYTHONUNBUFFERED": unbuffered, "STREAM": case.stream, "LINES": lines, **more}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
