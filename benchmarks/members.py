"""The cost of the peer filter on two hosts of this machine: `make bench-members`.

For each backend, two jobs of one rank on each of two hosts (see hosts.py) run at the same time. One has the filter, as
`train` loads it if SHOAL_MEMBERS_ONLY is 1. The rival is without. They take turns: while one measures, the other
waits. The figures are medians of the rounds. Each goal is at least 0.97 times the speed without.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from hosts import Host, missing, two_hosts
from link import end, environment
from report import Figure, finish, make_parser, print_machine

from smdistributed.core import native

RANKS = Path(__file__).with_name("members_ranks.py")
FILTER = native.PATH.with_name("_peer_filter.so")
RATE = "20gbit"
BACKENDS = ("gloo", "smddp")
CEILING = 1 / 0.97


def main(arguments: list[str]) -> int:
    """Measure, and print the figures."""
    options = make_parser(__doc__, 40).parse_args(arguments)
    if problem := missing("tc"):
        sys.exit(f"members.py needs {problem}. Nothing was measured.")
    print_machine()
    figures = []
    for backend in BACKENDS:
        with two_hosts(RATE) as hosts:
            figures += compare(backend, hosts, options.rounds)
    return finish(figures)


def compare(backend: str, hosts: tuple[Host, Host], rounds: int) -> list[Figure]:
    """The figures of a backend."""
    with ExitStack() as undo:
        jobs = [start(hosts, backend, filtered, undo) for filtered in (True, False)]
        found: list[list[dict[str, float]]] = [[], []]
        for number in range(rounds + 1):  # one to warm up
            for index in ((0, 1), (1, 0))[number % 2]:
                found[index].append(measure(jobs[index]))
        for rank in (rank for job in jobs for rank in job):
            rank.communicate()
    ours, rival = ({name: median(each[name] for each in times[1:]) for name in times[0]} for times in found)
    return [
        Figure(
            f"members-{backend}-{name}",
            1000 * ours[name],
            "ms",
            rival=1000 * rival[name],
            rival_name="open",
            ceiling=CEILING,
        )
        for name in ours
    ]


def start(hosts: tuple[Host, Host], backend: str, filtered: bool, undo: ExitStack) -> list[subprocess.Popen[bytes]]:
    """Start a rank on each host. Each job has its own port."""
    ranks = []
    for rank, host in enumerate(hosts):
        variables = {**environment(hosts, rank, 1), "MASTER_PORT": "29500" if filtered else "29501"}
        if filtered:
            variables |= {"LD_PRELOAD": str(FILTER), "SHOAL_PEERS": hosts[1 - rank].address}
        command = host.command(
            "env", *(f"{name}={value}" for name, value in changed(variables)), sys.executable, RANKS, backend
        )
        ranks.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        undo.callback(end, ranks[-1])
    return ranks


def changed(variables: dict[str, str]) -> list[tuple[str, str]]:
    """The variables that this process does not have: `ip netns exec` must not load the filter itself."""
    return [(name, value) for name, value in variables.items() if os.environ.get(name) != value]


def measure(job: list[subprocess.Popen[bytes]]) -> dict[str, float]:
    """Let a job measure once. Returns seconds by case."""
    for rank in job:
        assert rank.stdin
        rank.stdin.write(b"go\n")
        rank.stdin.flush()
    assert job[0].stdout
    found: dict[str, float] = json.loads(job[0].stdout.readline())
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
