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

`--tensorflow PYTHON` measures TensorFlow instead, with a Python that has it, scikit-learn and our library. The model
has three layers of 1,024; the hosts use MPI:

- `tf-int8-RATE`: `Compression.int8` against no compression, and against `fp16` and `bf16`; `tf-int8-bytes`;
- `accuracy-tf-digits-METHOD`: as above, with `Model.fit` and `DistributedOptimizer`.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from hosts import INTERFACE, Host, missing, two_hosts
from link import PORT, run
from report import Figure, finish, make_parser, print_machine

RANKS = Path(__file__).with_name("compression_ranks.py")
TENSORFLOW_RANKS = RANKS.with_name("compression_tensorflow_ranks.py")
GOALS = {"100mbit": 1 / 3, "1gbit": 1.0, "10gbit": 1.0}
"""Of the time of int8, in that without compression. Equal means: no slower, but for noise of 5 %."""
NOISE = 1.05
METHODS = ("fp16", "bf16", "int8", "low_rank", "top_k")


def main(arguments: list[str]) -> int:
    """Measure, and print the figures."""
    parser = make_parser(__doc__, 5)
    parser.add_argument("--tensorflow", type=Path, metavar="PYTHON", help="measure TensorFlow, with this Python")
    options = parser.parse_args(arguments)
    problem = missing("tc")
    if problem:
        sys.exit(f"compression.py needs {problem}. Nothing was measured.")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    print_machine()
    return finish(in_tensorflow(options) if options.tensorflow else in_torch(options))


def in_torch(options: Any) -> list[Figure]:
    """The figures of PyTorch."""
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
    return figures


def in_tensorflow(options: Any) -> list[Figure]:
    """The figures of TensorFlow."""
    figures = []
    for rate in GOALS:
        with two_hosts(rate) as hosts:
            found = run_with_mpi(hosts, options.tensorflow, "speed", options.rounds)
        ms = {name: 1000 * seconds for name, seconds in found["seconds"].items()}
        print(rate, *(f"{name} {value:.0f}" for name, value in ms.items()), "ms", flush=True)
        rivals = (
            ("", "none", GOALS[rate] if rate == "100mbit" else NOISE),
            ("-fp16", "fp16", None),
            ("-bf16", "bf16", None),
        )
        figures += [
            Figure(f"tf-int8-{rate}{end}", ms["int8"], "ms", rival=ms[rival], rival_name=rival, ceiling=goal)
            for end, rival, goal in rivals
        ]
        if rate == "100mbit":
            sent = found["bytes"]
            figures.append(
                Figure("tf-int8-bytes", sent["int8"], "bytes", rival=sent["none"], rival_name="float32", ceiling=0.27)
            )
    with two_hosts("10gbit") as hosts:
        found = run_with_mpi(hosts, options.tensorflow, "accuracy", 5)
    return [*figures, *accuracy({"tf-digits": found["digits"]})]


def run_with_mpi(hosts: tuple[Host, Host], python: Path, *words: object) -> dict[str, Any]:
    """Runs a rank of TensorFlow on each host, by mpirun on the first. Each host has a name of its own."""
    with tempfile.TemporaryDirectory() as directory:
        out, agent = Path(directory, "measured.json"), Path(directory, "agent")
        named = f'unshare --uts sh -c \'hostname "$0"; exec sh -c "$*"\' {hosts[1].namespace}'
        agent.write_text(f'#!/bin/sh\nshift\nexec {shlex.join(hosts[1].command())} {named} "$@"\n')
        agent.chmod(0o755)
        options = {"plm": "ssh", "plm_ssh_agent": agent, "oob_tcp_if_include": INTERFACE}
        mca = [word for name, value in options.items() for word in ("--prtemca", name, str(value))]
        btl = ["--mca", "btl", "tcp,self", "--mca", "btl_tcp_if_include", INTERFACE]
        where = ["--host", ",".join(f"{host.address}:1" for host in hosts), "-np", "2"]
        ranks = [*where, python, TENSORFLOW_RANKS, out, *words]
        command = [python.with_name("mpirun"), "--allow-run-as-root", "--bind-to", "none", *mca, *btl, *ranks]
        variables = {"TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1", "MASTER_ADDR": hosts[0].address}
        subprocess.run(hosts[0].command(*command), check=True, env={**os.environ, **variables, "MASTER_PORT": PORT})
        return dict(json.loads(out.read_text()))


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
        unit = "%" if "digits" in data else "nats"
        for method in [name for name in METHODS if name in by_method]:
            name = f"accuracy-{data}-{method}"
            ours = by_method[method]
            figures.append(
                Figure(name, mean(ours), unit, goal=bound, rival=mean(plain), rival_name="uncompressed", rounds=ours)
            )
    return figures


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
