"""all_reduce over a slow link between two hosts, on `smddp` against gloo, in one run: `make bench-link`.

Two "hosts" on this machine (see hosts.py) are joined by a wire of 1 Gbit/s each way. The figures are medians
of the rounds. In each round the libraries take turns, after a barrier, and the slowest rank counts. The rival
is torch's own gloo group of all ranks, which does not know hosts. With R ranks on each of two hosts:

- `link-all-reduce-64MB-2xR`: float32, against gloo;
- `link-bytes-64MB-2xR`: bytes on the wire, in the direction with more, against the minimum: the whole tensor. The
  interface counts 64 KiB as one packet, so that headers hardly count here. For the rate they do, packet by packet;
- `link-float16-2xR`: as many float16, which are half the bytes, against float32.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from hosts import INTERFACE, Host, missing, two_hosts
from report import Figure, finish, make_parser, print_machine

RANKS = Path(__file__).with_name("link_ranks.py")
RATE = "1gbit"
BYTES, MB = 64 << 20, 1 << 20
CEILINGS = {2: 1 / 1.4, 4: 1 / 1.6}
"""By ranks on each host: of smddp's time, in gloo's. A ring of N ranks passes each byte 2 (N - 1) / N times."""
PORT = "29500"  # in namespaces of its own every port is free

Measured = dict[str, dict[str, dict[str, float]]]


def main(arguments: list[str]) -> int:
    """Measure, and print the figures."""
    parser = make_parser(__doc__, 10)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the times there, for scale.py --link")
    options = parser.parse_args(arguments)
    problem = missing("tc")
    if problem:
        sys.exit(f"link.py needs {problem}. Nothing was measured.")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # what was made is removed then, too
    print_machine()
    with two_hosts(RATE) as hosts:
        found = {ranks: measure(hosts, ranks, options.rounds, [BYTES]) for ranks in CEILINGS}
    if options.json:
        options.json.write_text(json.dumps({f"2x{ranks}": measured for ranks, measured in found.items()}, indent=1))
    return finish([figure for ranks, measured in found.items() for figure in figures(ranks, measured[str(BYTES)])])


def run(hosts: tuple[Host, Host], ranks: int, script: Path, *words: object) -> dict[str, Any]:
    """Run ranks of a script on each host. Its first argument is a file; returns the JSON that it then has."""
    with tempfile.TemporaryDirectory() as directory, ExitStack() as undo:
        out = Path(directory, "measured.json")
        started = []
        for rank in range(2 * ranks):
            host = hosts[rank // ranks]
            command = host.command(sys.executable, script, out, *words)
            process = subprocess.Popen(command, env=environment(hosts, rank, ranks))
            undo.callback(end, process)
            started.append(process)
        wait(started)
        return dict(json.loads(out.read_text()))


def measure(hosts: tuple[Host, Host], ranks: int, rounds: int, sizes: list[int]) -> Measured:
    """Run ranks on each host. Returns their measurements, by size and library."""
    measured: Measured = run(hosts, ranks, RANKS, rounds, *sizes)
    for size, engines in measured.items():
        listed = ", ".join(f"{engine} {1000 * found['seconds']:.1f}" for engine, found in engines.items())
        print(f"2 hosts × {ranks} ranks, {int(size) / MB:g} MB as float32: {listed} ms", flush=True)
    return measured


def environment(hosts: tuple[Host, Host], rank: int, ranks: int) -> dict[str, str]:
    """The variables of a rank."""
    meeting = {"MASTER_ADDR": hosts[0].address, "MASTER_PORT": PORT, "GLOO_SOCKET_IFNAME": INTERFACE}
    return {
        **os.environ,
        **meeting,
        "RANK": str(rank),
        "WORLD_SIZE": str(2 * ranks),
        "LOCAL_RANK": str(rank % ranks),
        "SMDDP_HOST": hosts[rank // ranks].namespace,
        "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # it warns of each address without a name
    }


def wait(ranks: list[subprocess.Popen[bytes]]) -> None:
    """Wait until all have ended. Raises CalledProcessError when one fails; the others may wait for it forever."""
    for rank in ranks:
        code = rank.wait()
        if code:
            raise subprocess.CalledProcessError(code, rank.args)


def end(process: subprocess.Popen[bytes]) -> None:
    """End a rank that still runs."""
    process.kill()
    process.wait()


def figures(ranks: int, measured: dict[str, dict[str, float]]) -> list[Figure]:
    """The figures for a number of ranks on each host."""
    ours, gloo, half = (1000 * measured[engine]["seconds"] for engine in ("smddp", "gloo", "smddp-float16"))
    passed = max(measured["smddp"][way] for way in ("tx", "rx")) / MB
    grid, bound = f"2x{ranks}", BYTES / MB
    return [
        Figure(f"link-all-reduce-64MB-{grid}", ours, "ms", rival=gloo, rival_name="gloo", ceiling=CEILINGS[ranks]),
        Figure(f"link-bytes-64MB-{grid}", passed, "MB", rival=bound, rival_name="least", ceiling=1.05),
        Figure(f"link-float16-{grid}", half, "ms", rival=ours, rival_name="float32", ceiling=1 / 1.9),
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
