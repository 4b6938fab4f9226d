"""The common parts of benchmarks: options, one `RESULT` line per figure, and the machine it was measured on."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

MISSED = 3
"""The exit code when a goal is missed."""


@dataclass(frozen=True)
class Figure:
    """A measured figure, smaller is better.

    `goal` bounds `ours`; with a `rival`, `ceiling` bounds ours ÷ rival. A figure without a bound is information.
    `rounds` and `rival_rounds` are the values of which the figures are medians, and are printed as a range.
    """

    name: str
    ours: float
    unit: str
    goal: float | None = None
    rival: float | None = None
    rival_name: str = "rival"
    ceiling: float | None = None
    rounds: Sequence[float] = ()
    rival_rounds: Sequence[float] = ()

    @property
    def met(self) -> bool:
        within_goal = self.goal is None or self.ours <= self.goal
        return within_goal and (self.ceiling is None or self.rival is None or self.ours <= self.ceiling * self.rival)

    def __str__(self) -> str:
        words = [f"RESULT name={self.name}", f"ours={self.ours:.4g}"]
        if self.rival is not None:
            words += [f"rival={self.rival:.4g}", f"rival_name={self.rival_name}"]
        words.append(f"unit={self.unit}")
        if self.rival:
            words.append(f"ratio={self.rival / self.ours:.3g}")
        if self.goal is not None:
            words.append(f"goal=<={self.goal:g}")
        if self.ceiling is not None:
            words.append(f"goal=<={self.ceiling:g}×rival")
        if self.goal is not None or self.ceiling is not None:
            words.append(f"met={'yes' if self.met else 'no'}")
        for name, rounds in (("", self.rounds), ("rival_", self.rival_rounds)):
            if rounds:
                words.append(f"{name}rounds={len(rounds)} {name}range={min(rounds):.4g}..{max(rounds):.4g}")
        return " ".join(words)


def make_parser(doc: str | None, rounds: int | None = None) -> argparse.ArgumentParser:
    """Make a parser of a benchmark's options, with its docstring as help. rounds: the default of `--rounds`."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if rounds is not None:
        parser.add_argument(
            "--rounds", type=_positive, default=rounds, metavar="N", help="repeat so often (%(default)s)"
        )
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not 1 or more")
    return number


def mpirun(ranks: int, *words: object, options: str = "") -> list[str]:
    """The command that runs Python with these words on a number of ranks of this machine."""
    given = f"--allow-run-as-root --oversubscribe --bind-to none {options} -np {ranks}".split()
    return [str(Path(sys.executable).with_name("mpirun")), *given, sys.executable, *map(str, words)]


def print_machine() -> None:
    """Print the machine that the figures are of."""
    print(machine())


def machine() -> str:
    """Say what this machine is: processor, cores, memory, kernel."""
    cpu = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), "")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1024**3
    model = cpu.partition(": ")[2] or platform.machine()
    return f"machine: {model}, {os.cpu_count()} cores, {memory:.0f} GiB, Linux {platform.release().split('-')[0]}"


def finish(figures: Iterable[Figure]) -> int:
    """Print the figures and return the exit code: 0 when all goals are met, 3 when one is missed."""
    missed = False
    for figure in figures:
        print(figure)
        missed = missed or not figure.met
    return MISSED if missed else 0
