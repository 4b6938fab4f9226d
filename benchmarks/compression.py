"""Gradient compression on a slow network, and its accuracy: `make bench-compression`.

Two "hosts" on this machine (see hosts.py) have a rank each, and train a small GPT with DistributedDataParallel. In each
round the ways take turns; the slowest rank counts. The figures are medians of the rounds, in milliseconds a step:

- `int8-RATE`: `compress_gradients(model, "int8")`, against no compression, both on smddp. It measures itself, and may
  be off.
- `int8-RATE-fp16`: against the fp16 hook of torch on gloo. `int8-RATE-powersgd` against its PowerSGD, of rank 4.
- `low-rank-RATE-powersgd`: `low_rank` on smddp, which is PowerSGD too, against that on gloo.
- `int8-bytes`: bytes on the wire in a step of int8, against float32.
- `accuracy-gpt-METHOD`: the last loss of a GPT, against no compression. `accuracy-digits-METHOD`: wrong answers in
  percent. Both are means over 5 seeds. The bound is the rival's mean and two of its standard errors.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from statistics import mean, stdev

from hosts import missing, two_hosts
from link import run
from report import Figure, finish, make_parser, print_machine

RANKS = Path(__file__).with_name("compression_ranks.py")
GOALS = {"100mbit": 1 / 3, "1gbit": 1.0, "10gbit": 1.0}
"""Of the time of int8, in that without compression. Equal means: no slower, but for noise of 5 %."""
NOISE = 1.05
METHODS = ("fp16", "bf16", "int8", "low_rank", "top_k")


def main(arguments: list[str]) -> int:
    """Measure, and print the figures."""
    options = make_parser(__doc__, 5).parse_args(arguments)
    problem = missing("tc")
    if problem:
        sys.exit(f"compression.py needs {problem}. Nothing was measured.")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    print_machine()
    figures = []
    for rate, ceiling in GOALS.items():
        with two_hosts(rate) as hosts:
            found = run(hosts, 1, RANKS, "speed", options.rounds)
        print(rate, *(f"{name} {1000 * seconds:.0f}" for name, seconds in found["seconds"].items()), "ms", flush=True)
        figures += speed(rate, ceiling, found["seconds"])
        if rate == "100mbit":
            sent = found["bytes"]
            figures.append(
                Figure("int8-bytes", sent["int8"], "bytes", rival=sent["none"], rival_name="float32", ceiling=0.27)
            )
    with two_hosts("10gbit") as hosts:
        figures += accuracy(run(hosts, 1, RANKS, "accuracy", 5))
    return finish(figures)


def speed(rate: str, ceiling: float, seconds: dict[str, float]) -> list[Figure]:
    """The figures for a rate."""
    ms = {name: 1000 * value for name, value in seconds.items()}
    bound = ceiling if ceiling < 1 else NOISE
    slow = rate == "100mbit"
    return [
        Figure(f"int8-{rate}", ms["int8"], "ms", rival=ms["none"], rival_name="uncompressed", ceiling=bound),
        *(
            Figure(f"{ours}-{rate}-{rival}", ms[way], "ms", rival=ms[against], rival_name=against, ceiling=goal)
            for ours, way, rival, against, goal in (
                ("int8", "int8", "fp16", "gloo-fp16", 1 / 1.3 if slow else None),
                ("int8", "int8", "powersgd", "gloo-powersgd", 1 / 1.3 if slow else None),
                ("low-rank", "low_rank", "powersgd", "gloo-powersgd", None),
            )
        ),
    ]


def accuracy(found: dict[str, dict[str, list[float]]]) -> list[Figure]:
    """The figures of the last losses or errors: by data, method and seed."""
    figures = []
    for data, by_method in found.items():
        plain = by_method["none"]
        bound = mean(plain) + 2 * stdev(plain) / len(plain) ** 0.5
        unit = "%" if data == "digits" else "nats"
        for method in METHODS:
            name = f"accuracy-{data}-{method}"
            ours = by_method[method]
            figures.append(
                Figure(name, mean(ours), unit, goal=bound, rival=mean(plain), rival_name="uncompressed", rounds=ours)
            )
    return figures


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
