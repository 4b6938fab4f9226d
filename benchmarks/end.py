"""From the last line of a script to the prompt: `make bench-end`, for `shoal run` against `docker run`.

The script is the one of examples/digits, with a last line that prints the time. `shoal run` runs it with 4 ranks on one
host, and with 2 ranks on each of 2 hosts. The rival is `docker run --rm` of the same image, with torchrun and 4 ranks:
it keeps no files. The time counts from the last line of the last rank until the command has ended. Figures are medians
of the rounds, the sides in turn.
"""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from digits_job import JOBS, copy_script, make_shoal_command
from report import Figure, finish

GOAL = 0.5
LAST_LINE = "\n    import time\n    print(f'the last line at {time.time():.3f}', flush=True)\n"


def main(arguments: Sequence[str]) -> int:
    """Run all sides in turn, and print the figures."""
    with copy_script(__doc__, arguments) as (options, code):
        with (code / "train.py").open("a") as script:
            script.write(LAST_LINE)
        sides = {name: make_shoal_command(options.image, code, name) for name in JOBS}
        sides["docker-run"] = make_docker_command(options.image, code)
        rounds: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(options.rounds):
            for name, command in sides.items():
                rounds[name].append(measure(command, code.parent))
    rival = rounds.pop("docker-run")
    middle = statistics.median(rival)
    return finish(
        Figure(f"end-{name}", statistics.median(ours), "s", GOAL, middle, "docker-run", None, ours, rival)
        for name, ours in rounds.items()
    )


def make_docker_command(image: str, code: Path) -> list[str]:
    """Return the same script's command without Shoal."""
    torchrun = ("torchrun", "--standalone", "--nproc-per-node=4", "/code/train.py", "--model-dir=/tmp/m")
    mount = f"{code}:/code:ro"
    command = ["docker", "run", "--rm", "--shm-size=1g", "-v", mount, "--entrypoint", "", image, *torchrun]
    return [*command, "--output-data-dir=/tmp/o"]


def measure(command: Sequence[str], directory: Path) -> float:
    """Run a command. Return the seconds from the last line to its end."""
    done = subprocess.run(command, cwd=directory, check=False, capture_output=True, text=True)
    ended = time.time()
    times = [float(found) for found in re.findall(r"the last line at (\d+\.\d+)", done.stdout + done.stderr)]
    if done.returncode or len(times) != 4:
        raise SystemExit(f"{command}: exit code {done.returncode}, {len(times)} of 4 ranks\n{done.stderr}")
    return ended - max(times)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
