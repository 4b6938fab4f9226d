"""A model of all_reduce, checked against this machine and drawn for 2,048 ranks: `make bench-scale`.

Measures all_reduce of 1 KB to 64 MB through shared memory on 2, 4 and 8 ranks of this host (the fastest tenth of
the rounds: the model knows no other load), and fits seconds = alpha + beta × bytes to every other size.

- `scale-fit-Nranks`: the median relative error at the sizes that the fit has not seen;
- `scale-fit-8ranks-from-2-and-4`: the same error of a line for 8 ranks, extrapolated from 2 and 4 (information);
- `scale-link-2xR-…`: with --link (what link.py --json has written), the relative error of the model's times between
  hosts. Its only constant is the link's rate.

The picture is a MODEL, not a measurement: the same formulas with the constants in data/scale.json, which
have their sources beside them.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from dataparallel import environment
from report import Figure, finish, make_parser, mpirun, print_machine
from scale_model import ALL_REDUCES, Line, efficiency, errors, extrapolate, fit
from scale_picture import draw

HERE = Path(__file__).parent
PICTURE = HERE.parent / "docs" / "scaling.svg"
SIZES = [1 << shift for shift in range(10, 27, 2)]  # 1 KB, 4 KB, ... 64 MB
RANKS = (2, 4, 8)
CEILING = 0.25
LINK_BYTES_PER_SECOND = 1e9 / 8 * 1448 / 1514  # 1 Gbit/s, of which headers take their part
HOSTS = [1 << shift for shift in range(9)]  # 1, 2, ... 256


def main(arguments: list[str]) -> int:
    """Measure, fit, check, draw, and print the figures."""
    parser = make_parser(__doc__, 20)
    parser.add_argument("--link", type=Path, metavar="FILE", help="compare with the times of link.py --json")
    parser.add_argument("--output", type=Path, metavar="FILE", default=PICTURE, help="the picture (docs/scaling.svg)")
    options = parser.parse_args(arguments)
    print_machine()
    measured = {ranks: measure(ranks, options.rounds) for ranks in RANKS}
    figures = check(measured)
    if options.link:
        figures += check_link(json.loads(options.link.read_text()))
    constants = json.loads((HERE / "data" / "scale.json").read_text())
    curves = {name: [efficiency(way, hosts, constants) for hosts in HOSTS] for name, way in ALL_REDUCES.items()}
    ranks = [hosts * constants["host"]["ranks"] for hosts in HOSTS]
    for name, curve in curves.items():
        print(f"model, not measured: {name}: {curve[-1]:.0%} scaling efficiency on {ranks[-1]} ranks")
    options.output.write_text(draw(ranks, curves, constants))
    return finish(figures)


def measure(ranks: int, rounds: int) -> dict[int, float]:
    """Run the ranks; returns seconds by bytes."""
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory, "seconds.json")
        subprocess.run(mpirun(ranks, HERE / "scale_ranks.py", out, rounds, *SIZES), env=environment(), check=True)
        return {int(size): seconds for size, seconds in json.loads(out.read_text()).items()}


def check(measured: dict[int, dict[int, float]]) -> list[Figure]:
    """Fit to every other size, and compare at the rest."""
    lines: dict[int, Line] = {}
    figures = []
    for ranks, seconds in measured.items():
        lines[ranks] = line = fit({size: seconds[size] for size in SIZES[::2]})
        unseen = {size: seconds[size] for size in SIZES[1::2]}
        print(f"{ranks} ranks: {1e6 * line.alpha:.0f} us + bytes / {1e-9 / line.beta:.2f} GB/s; measured (model), ms:")
        listed = (f"{size >> 10} KB {1e3 * time:.3f} ({1e3 * line(size):.3f})" for size, time in seconds.items())
        print("  " + ", ".join(listed))
        figures.append(Figure(f"scale-fit-{ranks}ranks", median(errors(line, unseen)), "relative-error", goal=CEILING))
    guess = median(errors(extrapolate(lines[2], lines[4], 8), measured[8]))
    return [*figures, Figure("scale-fit-8ranks-from-2-and-4", guess, "relative-error")]


def check_link(measured: dict[str, dict[str, dict[str, dict[str, float]]]]) -> list[Figure]:
    """Compare the model's times between hosts: each byte once in two levels, 2 (N - 1) / N times around a ring."""
    figures = []
    for grid, sizes in measured.items():
        ranks = 2 * int(grid.partition("x")[2])
        for size, engines in sizes.items():
            for engine, crossings in (("smddp", 1.0), ("gloo", 2 * (ranks - 1) / ranks)):
                line = Line(0, crossings / LINK_BYTES_PER_SECOND)
                error = errors(line, {int(size): engines[engine]["seconds"]})[0]
                figures.append(Figure(f"scale-link-{grid}-{engine}", error, "relative-error", goal=CEILING))
    return figures


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
