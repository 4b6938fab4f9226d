"""The script of examples/digits as a job to be timed: a copy of it, and its commands with and without Shoal."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from report import make_parser, print_machine

ROOT = Path(__file__).resolve().parents[1]
IMAGE = "pytorch-training:2.13.0-cpu-py311-debian12"
JOBS = {"1x4": ("--hosts", "1", "--procs-per-host", "4"), "2x2": ("--hosts", "2", "--procs-per-host", "2")}
_SHOAL = str(Path(sys.executable).with_name("shoal"))


@contextmanager
def copy_script(description: str | None, arguments: Sequence[str]) -> Iterator[tuple[argparse.Namespace, Path]]:
    """Parse the options of a benchmark, and print the machine. Give the options and a copy of the script's directory.

    The copy and its parent directory are removed at the end.
    """
    options = make_parser(description, 3)
    options.add_argument("--image", default=IMAGE, help="the image (%(default)s)")
    chosen = options.parse_args(arguments)
    print_machine()
    with tempfile.TemporaryDirectory() as directory:
        code = Path(directory, "code")
        shutil.copytree(ROOT / "examples" / "digits", code)
        yield chosen, code


def make_shoal_command(image: str, code: Path, name: str) -> list[str]:
    """Return the command of a job of `JOBS`."""
    return [_SHOAL, "run", image, str(code / "train.py"), "--plain", *JOBS[name]]


def time_torchrun(code: Path) -> float:
    """Run the script with 4 ranks and without a container. Return its seconds."""
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4")
    with tempfile.TemporaryDirectory() as scratch:
        places = (f"--model-dir={scratch}/model", f"--output-data-dir={scratch}/output")
        return time_command((*torchrun, str(code / "train.py"), *places), code.parent)


def time_command(command: Sequence[str], directory: Path) -> float:
    """Run a command in a directory. Return its seconds. Raises CalledProcessError if it fails."""
    began = time.monotonic()
    subprocess.run(command, cwd=directory, check=True, capture_output=True)
    return time.monotonic() - began
