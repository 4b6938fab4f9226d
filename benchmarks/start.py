"""From a checkout to a trained model: `make bench NAME=start` runs README's first two commands in a new clone.

A bare machine has no Docker, no image of Shoal and no cache of builds. The command prints which of these this one has.
`--fresh` removes the image first, but neither Docker, its cache nor pip's.
"""

from __future__ import annotations

import shutil
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


def main(arguments: Sequence[str]) -> int:
    """Run both commands, and print the seconds and the size of the environment."""
    options = make_parser(__doc__)
    options.add_argument("--fresh", action="store_true", help="remove the image first")
    if options.parse_args(arguments).fresh:
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
