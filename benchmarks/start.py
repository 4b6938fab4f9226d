"""From a checkout to a trained model: `make bench NAME=start` runs README's first two commands in a new clone.

A bare machine has no Docker, no image of Shoal and no cache of builds. The command prints which of these this one has.
`--fresh` removes the image first, but neither Docker, its cache nor pip's.

`--lock` measures a script with a lock file of some 30 packages instead, none of them a framework. It counts from the
start of `shoal run` to the script's first line. The rival is `uv sync` in a new container, from `docker run` on.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from report import Figure, finish, make_parser, print_machine

ROOT = Path(__file__).resolve().parents[1]
IMAGE = "pytorch-training:2.13.0-cpu-py311-debian12"
MAKE_IMAGE = ("make", "image", f"IMAGE={IMAGE}")
RUN = (".venv/bin/shoal", "run", IMAGE, "examples/digits/train.py", "--hosts", "2", "--procs-per-host", "2")
MB = 1e6
LOCK_ROUNDS = 5
PROJECT = """\
[project]
name = "locked"
version = "0.1"
requires-python = ">=3.11"
dependencies = ["einops", "tiktoken", "wandb"]
"""
SYNC = (
    "mkdir /tmp/p && cp /project/pyproject.toml /project/uv.lock /tmp/p && cd /tmp/p && /uv sync -q --frozen --no-cache"
)
CA = "/etc/ssl/certs/ca-certificates.crt"


def main(arguments: Sequence[str]) -> int:
    """Run both commands, and print the seconds and the size of the environment."""
    options = make_parser(__doc__, LOCK_ROUNDS)
    options.add_argument("--fresh", action="store_true", help="remove the image first")
    options.add_argument("--lock", action="store_true", help="measure a script with a lock file")
    options.add_argument("--image", default=IMAGE, help="the image for --lock (%(default)s)")
    chosen = options.parse_args(arguments)
    if chosen.lock:
        return measure_lock(chosen.image, chosen.rounds)
    if chosen.fresh:
        subprocess.run(("docker", "image", "rm", IMAGE), check=True, stdout=subprocess.DEVNULL)
    print_machine()
    print(f"before: {describe_docker()}")
    with tempfile.TemporaryDirectory() as directory:
        clone = Path(directory, "shoal")
        subprocess.run(("git", "clone", "-q", ROOT, clone), check=True)
        image, job = (run(command, clone) for command in (MAKE_IMAGE, RUN))
        size = sum(path.lstat().st_blocks * 512 for path in (clone / ".venv").rglob("*"))
    return finish(
        (
            Figure("start-environment", size / MB, "MB", goal=100),
            Figure("start-image", image, "s"),
            Figure("start-job", job, "s"),
            Figure("start-to-trained", image + job, "s", goal=150),
        )
    )


def measure_lock(image: str, rounds: int) -> int:
    """Measure the first start of a script with a lock file, later ones, and `uv sync`."""
    print_machine()
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "pyproject.toml").write_text(PROJECT)
        (Path(directory) / "train.py").write_text("import einops, tiktoken\nprint('started')")
        uv = ROOT / ".venv" / "bin" / "uv"
        subprocess.run((uv, "lock", "-q"), cwd=directory, check=True)
        first, *again = [time_first_line(image, directory) for _ in range(rounds + 1)]
        mounts = (f"{directory}:/project:ro", f"{uv}:/uv:ro", f"{CA}:{CA}:ro")
        options = [word for mount in mounts for word in ("-v", mount)]
        command = ("docker", "run", "--rm", *options, "-e", f"SSL_CERT_FILE={CA}", image, "sh", "-c", SYNC)
        sync = [run(command, Path(directory)) for _ in range(rounds)]
    middle, rival = statistics.median(again), statistics.median(sync)
    return finish(
        (
            Figure("start-with-lock-first", first, "s"),
            Figure("start-with-lock-again", middle, "s", 2, rival, "uv-sync", 0.2, again, sync),
        )
    )


def time_first_line(image: str, directory: str) -> float:
    """Run the script as a job. Returns the seconds until its first line."""
    command = (ROOT / ".venv" / "bin" / "shoal", "run", image, f"{directory}/train.py", "--plain")
    began, seconds = time.perf_counter(), 0.0
    with subprocess.Popen(command, cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as job:
        for line in job.stdout or ():
            if line.rstrip().endswith("| started"):
                seconds = time.perf_counter() - began
            print(line, end="", file=sys.stderr)
    if job.returncode or not seconds:
        raise SystemExit(f"the job failed with {job.returncode}")
    return seconds


def describe_docker() -> str:
    """Say which parts of a bare machine's work are done already."""
    if not shutil.which("docker"):
        return "no Docker"
    if subprocess.run(("docker", "version"), check=False, capture_output=True).returncode:
        return "Docker's client is installed, and Docker does not run"
    listed = ("docker", "image", "ls", "--quiet", "--filter", "reference=*-training")
    found = subprocess.run(listed, check=False, capture_output=True, text=True).stdout.split()
    return f"Docker is installed, with {len(found)} images of Shoal"


def run(command: Sequence[str], clone: Path) -> float:
    """Run a command in the clone. Returns its seconds."""
    began = time.perf_counter()
    subprocess.run(command, cwd=clone, check=True, stdout=sys.stderr)
    return time.perf_counter() - began


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
