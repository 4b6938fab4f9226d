"""From an edit to the prompt: `make bench-edit`, for `shoal run --watch` against torchrun without a container.

The script is the one of examples/digits. `shoal run --watch` has run it, and its next containers are ready. The time
counts from the changed script until the command waits for the next change. Then the containers of the run are gone, and
its results, archives and report are written. It runs with 4 ranks on one host, and with 2 ranks on each of 2 hosts. The
rival is torchrun with 4 ranks on this machine, from its start to its end. It runs before each edit. Figures are medians
of the rounds.
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

from end import IMAGE, JOBS, ROOT, make_shoal_command
from report import Figure, finish, make_parser, print_machine

GOALS = {"1x4": 0.45, "2x2": None}
READY_SECONDS = 8.0
"""How long somebody edits at least: new containers start and import meanwhile."""
WAITS = "watching for changes"


def main(arguments: Sequence[str]) -> int:
    """Run both sides in turn, and print the figures."""
    options = make_parser(__doc__, 3)
    options.add_argument("--image", default=IMAGE, help="the image (%(default)s)")
    chosen = options.parse_args(arguments)
    print_machine()
    with tempfile.TemporaryDirectory() as directory:
        code = Path(directory, "code")
        shutil.copytree(ROOT / "examples" / "digits", code)
        figures = []
        for name, options_of_job in JOBS.items():
            command = [*make_shoal_command(chosen.image, code, options_of_job), "--watch"]
            ours, rival = measure(command, code, chosen.rounds)
            middle = statistics.median(ours)
            other = statistics.median(rival)
            figures.append(Figure(f"edit-{name}", middle, "s", None, other, "torchrun", GOALS[name], ours, rival))
    return finish(figures)


def measure(command: Sequence[str], code: Path, rounds: int) -> tuple[list[float], list[float]]:
    """Run a job, edit it so often, and run torchrun before each edit. Return the seconds of both."""
    ours, rival = [], []
    script = code / "train.py"
    with subprocess.Popen(command, cwd=code.parent, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as job:
        try:
            wait_for_prompt(job)
            for number in range(rounds):
                began = time.monotonic()
                rival.append(run_torchrun(script))
                time.sleep(max(0.0, READY_SECONDS - (time.monotonic() - began)))
                edited = script.with_suffix(".new~")
                edited.write_text(f"{script.read_text()}# edit {number}\n")
                began = time.monotonic()
                edited.replace(script)
                wait_for_prompt(job)
                ours.append(time.monotonic() - began)
        finally:
            job.terminate()
    return ours, rival


def wait_for_prompt(job: subprocess.Popen[str]) -> None:
    """Read the output until the command waits for a change. Raises SystemExit if a run failed."""
    for line in job.stdout or ():
        if "the job failed" in line:
            raise SystemExit(line)
        if WAITS in line:
            return
    raise SystemExit("the command has ended")


def run_torchrun(script: Path) -> float:
    """Run the script without a container. Return its seconds."""
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4")
    with tempfile.TemporaryDirectory() as scratch:
        places = (f"--model-dir={scratch}/model", f"--output-data-dir={scratch}/output")
        began = time.monotonic()
        subprocess.run((*torchrun, str(script), *places), check=True, capture_output=True)
        return time.monotonic() - began


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
