"""From the last line of a script to the prompt: `make bench-end`, for `shoal run` against `docker run`.

The script is the one of examples/digits, with a last line that prints the time. `shoal run` runs it with 4 ranks on one
host, and with 2 ranks on each of 2 hosts. The rival is `docker run --rm` of the same image, with torchrun and 4 ranks:
it keeps no files. The time counts from the last line of the last rank until the command has ended. Its stages are
printed. Figures are medians of the rounds, the sides in turn.
"""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from digits_job import JOBS, copy_script, make_shoal_command
from report import Figure, finish

GOAL = 0.5
LAST_LINE = "\n    import time\n    print(f'the last line at {time.time():.3f}', flush=True)\n"
STAGES = ("ranks", "train", "Docker, copy, pack", "report", "removal, exit")


def main(arguments: Sequence[str]) -> int:
    """Run all sides in turn, and print the stages of `shoal run` and the figures."""
    with copy_script(__doc__, arguments) as (options, code):
        with (code / "train.py").open("a") as script:
            script.write(LAST_LINE)
        command = make_docker_command(options.image, code)
        rounds: dict[str, list[list[float]]] = {name: [] for name in JOBS}
        rival = []
        for _ in range(options.rounds):
            for name, stages in rounds.items():
                began, last, ended = run_command(make_shoal_command(options.image, code, name), code.parent)
                stages.append(read_stages(code.parent, began, last, ended))
            _, last, ended = run_command(command, code.parent)
            rival.append(ended - last)
    for name, found in rounds.items():
        middles = map(statistics.median, zip(*found, strict=True))
        print(f"end-{name}:", ", ".join(f"{stage} {value:.2f} s" for stage, value in zip(STAGES, middles, strict=True)))
    middle = statistics.median(rival)
    ours = {name: [sum(stages) for stages in found] for name, found in rounds.items()}
    return finish(
        Figure(f"end-{name}", statistics.median(values), "s", GOAL, middle, "docker-run", None, values, rival)
        for name, values in ours.items()
    )


def make_docker_command(image: str, code: Path) -> list[str]:
    """Return the same script's command without Shoal."""
    torchrun = ("torchrun", "--standalone", "--nproc-per-node=4", "/code/train.py", "--model-dir=/tmp/m")
    mount = f"{code}:/code:ro"
    command = ["docker", "run", "--rm", "--shm-size=1g", "-v", mount, "--entrypoint", "", image, *torchrun]
    return [*command, "--output-data-dir=/tmp/o"]


def run_command(command: Sequence[str], directory: Path) -> tuple[float, float, float]:
    """Run a command. Return when it began, when the last rank printed its last line, and when the command ended."""
    began = time.time()
    done = subprocess.run(command, cwd=directory, check=False, capture_output=True, text=True)
    ended = time.time()
    times = [float(found) for found in re.findall(r"the last line at (\d+\.\d+)", done.stdout + done.stderr)]
    if done.returncode or len(times) != 4:
        raise SystemExit(f"{command}: exit code {done.returncode}, {len(times)} of 4 ranks\n{done.stderr}")
    return began, max(times), ended


def read_stages(directory: Path, began: float, last: float, ended: float) -> list[float]:
    """Return the seconds of each of `STAGES` of the newest job in a directory.

    `train` of the first host notes in job.json when the ranks had ended, and Docker when the last container did. The
    times of the archive and the report say when they were complete.
    """
    job = max((directory / "jobs").iterdir(), key=lambda path: path.stat().st_ctime)
    report = json.loads((job / "algo-1/output/job.json").read_text())
    ranks = report["began"] + report["launch_seconds"] + report["training_seconds"]
    filters = ("--filter", "event=die", "--filter", f"label=shoal.job={job.name}", "--format", "{{.TimeNano}}")
    command = ("docker", "events", "--since", f"{began:.3f}", "--until", f"{ended:.3f}", *filters)
    events = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    exits = max(int(line) / 1e9 for line in events.split())
    files = [(job / name).stat().st_mtime for name in ("output.tar.gz", "report.html")]
    times = [last, ranks, exits, *files, ended]
    return [later - earlier for earlier, later in pairwise(times)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
