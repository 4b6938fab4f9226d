"""From Enter, and from an edit, to the prompt: `make bench-edit`, for `shoal run` against torchrun without a container.

The script is the one of examples/digits. It runs with 4 ranks on one host, and with 2 ranks on each of 2 hosts. The
rival is torchrun with 4 ranks on this machine, from its start to its end. Each round runs the rival, `shoal run` from
its start to its end, and an edit under `shoal run --watch`. That has run the script, and its next containers are ready.
Its time counts from the changed script until the command waits for the next change. Then the containers of the run are
gone, and its results, archives and report are written. Figures are medians of the rounds.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from digits_job import JOBS, copy_script, make_shoal_command, time_command, time_torchrun
from report import Figure, finish

GOALS = {"digits-1x4": 0.6, "digits-2x2": 0.75, "edit-1x4": 0.45, "edit-2x2": None}
READY_SECONDS = 8.0
"""How long nothing else runs after a run: new containers start and import meanwhile."""
WAITS = "watching for changes"


def main(arguments: Sequence[str]) -> int:
    """Run all sides in turn, and print the figures."""
    figures = []
    with copy_script(__doc__, arguments) as (options, code):
        for name in JOBS:
            rival, sides = measure(make_shoal_command(options.image, code, name), code, options.rounds)
            middle = statistics.median(rival)
            for side, ours in sides.items():
                figure, goal = f"{side}-{name}", GOALS[f"{side}-{name}"]
                figures.append(
                    Figure(figure, statistics.median(ours), "s", None, middle, "torchrun", goal, ours, rival)
                )
    return finish(figures)


def measure(command: Sequence[str], code: Path, rounds: int) -> tuple[list[float], dict[str, list[float]]]:
    """Run a job under `--watch`, and all sides in turn. Return the rival's seconds, and ours by side."""
    rival: list[float] = []
    sides: dict[str, list[float]] = {"digits": [], "edit": []}
    script = code / "train.py"
    watch = (*command, "--watch")
    with subprocess.Popen(watch, cwd=code.parent, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as job:
        try:
            wait_for_prompt(job)
            for number in range(rounds):
                time.sleep(READY_SECONDS)
                rival.append(time_torchrun(code))
                sides["digits"].append(time_command(command, code.parent))
                edited = script.with_suffix(".new~")
                edited.write_text(f"{script.read_text()}# edit {number}\n")
                began = time.monotonic()
                edited.replace(script)
                wait_for_prompt(job)
                sides["edit"].append(time.monotonic() - began)
        finally:
            job.terminate()
    return rival, sides


def wait_for_prompt(job: subprocess.Popen[str]) -> None:
    """Read the output until the command waits for a change. Raises SystemExit if a run failed."""
    for line in job.stdout or ():
        if "the job failed" in line:
            raise SystemExit(line)
        if WAITS in line:
            return
    raise SystemExit("the command has ended")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
