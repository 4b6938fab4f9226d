"""A step of FSDP2 with torch.compile on `smddp` against gloo, in one run: `make bench-fsdp`.

The model is a GPT of 50 million parameters with 8 layers, each sharded over 2 ranks and compiled by Inductor. A rank's
batch is one sentence of 64 words, and the optimizer AdamW. Ranks have one thread each, on one host. The figures are
medians of the rounds. In each round the backends take turns, after a barrier, and the slowest rank counts.

- `fsdp2-compiled-float32`: all numbers are float32;
- `fsdp2-compiled-bfloat16`: weights are gathered, and gradients reduced, in bfloat16 (`MixedPrecisionPolicy`);
- `fsdp2-compiled-512words`: the same with 8 sentences a rank. Computing takes most of that step, so it has no goal.

The losses of the first steps must agree to 1e-5, and to 2e-2 in bfloat16.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from dataparallel import environment
from report import Figure, finish, make_parser, mpirun, print_machine

ROUNDS = 15
RANKS = Path(__file__).with_name("fsdp_ranks.py")
TOLERANCES = {"float32": 1e-5, "bfloat16": 2e-2, "512words": 2e-2}


def main(arguments: list[str]) -> int:
    """Measure, and print the figures."""
    rounds = make_parser(__doc__, ROUNDS).parse_args(arguments).rounds
    print_machine()
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory, "times.json")
        subprocess.run(mpirun(2, RANKS, out, rounds), env=environment(), check=True)
        measured = json.loads(out.read_text())
    print(f"{measured['parameters'] / 1e6:.1f} million parameters")
    figures = []
    for case, tolerance in TOLERANCES.items():
        seconds, losses = measured[case]["seconds"], measured[case]["losses"]
        print(f"{case}: losses on smddp {losses['smddp']}, on gloo {losses['gloo']}")
        for ours, other in zip(losses["smddp"], losses["gloo"], strict=True):
            if abs(ours - other) > tolerance * abs(other):
                raise SystemExit(f"{case}: the losses differ by more than {tolerance}")
        ours, rival = 1000 * seconds["smddp"], 1000 * seconds["gloo"]
        goal = None if case == "512words" else 0.8
        figures.append(Figure(f"fsdp2-compiled-{case}", ours, "ms", rival=rival, rival_name="gloo", ceiling=goal))
    return finish(figures)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
