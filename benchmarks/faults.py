"""Every fault of tests/faults, and how long each took to end: `make bench-faults`.

Runs the tests, which check everything and note what they measured, and prints the table.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from report import Figure, finish, machine, make_parser

ROOT = Path(__file__).resolve().parents[1]
ROWS = ROOT / ".cache" / "faults"
DOCUMENT = ROOT / "docs" / "reliability.md"
PLACE = re.compile(r"(?<=<!-- faults -->\n).*(?=<!-- /faults -->)", re.DOTALL)
TESTS = ["-q", "--no-header", "tests/faults"]
LAUNCHERS = ("process", "MPI", "torchrun")

Row = dict[str, Any]


def main(arguments: Sequence[str]) -> int:
    """Run the faults, and return the exit code."""
    parser = make_parser(__doc__)
    parser.add_argument("--write", action="store_true", help="write the table into docs/reliability.md")
    parser.add_argument("--workers", default="4", help="faults at a time; those that load the machine come alone")
    options = parser.parse_args(arguments)
    shutil.rmtree(ROWS, ignore_errors=True)
    failed = any([run("-m", "not soak", "-n", options.workers), run("-m", "soak", SHOAL_SOAK="1")])
    rows = read(ROWS)
    table = "".join(f"{line}\n" for line in [machine(), "", *as_table(rows)])
    print(table)
    if options.write:
        DOCUMENT.write_text(PLACE.sub(lambda _: f"\n{table}\n", DOCUMENT.read_text()))
    missed = finish(figures(rows))
    return 1 if failed else missed


def run(*options: str, **variables: str) -> bool:
    """Run tests, which hold the bars without slack; returns whether some failed."""
    command = [sys.executable, "-m", "pytest", *TESTS, *options]
    environment = {**os.environ, "SHOAL_FAULTS_SLACK": "1", **variables}
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode != 0


def read(directory: Path) -> list[Row]:
    """Return the measured rows, in the order of the tests."""
    return [row for path in sorted(directory.glob("*.json")) for row in json.loads(path.read_text())]


def as_table(rows: Iterable[Row]) -> Iterator[str]:
    """Write one line for each fault, with the seconds of each launcher."""
    faults: dict[str, list[Row]] = {}
    for row in rows:
        faults.setdefault(row["fault"], []).append(row)
    titles = ["fault", "exit codes", *LAUNCHERS, "bar", "the failure file begins with"]
    yield _line(titles)
    yield _line(["---", "---", *["---:"] * (len(LAUNCHERS) + 1), "---"])
    for fault, measured in faults.items():
        seconds = {row["launcher"]: _seconds(row) for row in measured}
        codes = dict.fromkeys(", ".join(map(str, row["codes"].values())) for row in measured)
        says = next((row["says"] for row in measured if row["says"]), "")
        named = [seconds.get(launcher, "") for launcher in LAUNCHERS]
        remark = next((f"; {row['remark']}" for row in measured if "remark" in row), "")
        yield _line(
            [fault + remark, " or ".join(codes), *named, f"{measured[0]['bar']:g}", _clipped(says.split(". ")[0])]
        )


def figures(rows: Iterable[Row]) -> Iterator[Figure]:
    """Return one figure for each row."""
    for row in rows:
        name = re.sub(r"\W+", "-", f"{row['fault']} {row['launcher']}").strip("-").lower()
        yield Figure(name, max(0.0, row["seconds"]), "s", row["bar"])


def _seconds(row: Row) -> str:
    return f"{max(0.0, row['seconds']):.1f}{'' if row['met'] else ' (failed)'}"


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _clipped(text: str, length: int = 110) -> str:
    return text if len(text) <= length else f"{text[:length].rpartition(' ')[0]} …"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
