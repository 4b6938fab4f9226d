"""How long a failure stops training, with `train` and with torchrun: `make bench-resume`.

Both run the same script on this machine (resume_train.py: gloo, a checkpoint every 10 steps). Parts, of `--parts`:

- `rank`: rank 1 of 2 gets SIGKILL, until rank 0 has completed the next step. Rival: `torchrun --max-restarts`.
- `host`: 2 hosts with a rank each, of which one is enough. The second host is killed with its rank, and started again
  at once. `host-killed`: until the next step, of any number of ranks. `host-replaced`: until the next step of 2 ranks.
  Rival: torchrun with a rendezvous (c10d) and `--nnodes=1:2`.
- `elastic`: 4 hosts with a rank each, in network namespaces, which need root. The last is killed, until the next step
  of 3 ranks. Then it is started again, until the next step of 4 ranks. Rival: torchrun `--nnodes=3:4`.
- `goodput`: with a killed rank every 15 s, for `--seconds`. Goodput is the number of the last step, times the median
  time of a step without failures, divided by the time since the first step. `lost-share` is 1 - goodput.
- `save`: how long a save of 100 M parameters stops the training (resume_save.py), against
  torch.distributed.checkpoint.save.

Both have been training for some seconds before a failure. Figures are medians of the rounds, the two sides in turn.
The parts of our restart are `rank-killed-...`: until the script runs again, imports, loading, and the first step.

The rival has the best settings that we found. Its ranks do not share the agents' store (OWN_STORE). In that store,
restarted ranks at times wait for the address of a rank that was killed. A replaced agent never finds the others. The
first host, which survives, serves the rendezvous. Lost hosts are noticed after 3 s instead of 15 s, and it waits 1 s
instead of 30 s for more hosts. A job that has not gone on after 90 s counts as 90 s.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import resume_save
from hosts import INTERFACE, switched_hosts
from report import Figure, finish, make_parser, print_machine

SCRIPT = Path(__file__).with_name("resume_train.py")
TORCHFT_SCRIPT = Path(__file__).with_name("resume_torchft.py")
PARTS = ("rank", "host", "elastic", "goodput", "save")
ROUNDS = 3
WARM_SECONDS = 8.0  # of training before a failure: by then `train` has its standby
RIVAL_WARM_SECONDS = 3.0
EVERY_SECONDS = 15.0
GOODPUT_SECONDS = 180
LIMIT_SECONDS = 90.0
START_SECONDS = 300.0
FOREVER = "1000000000"
LEAST = {2: 1, 4: 3}  # hosts that are enough, of that many
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
RENDEZVOUS = "join_timeout=60,last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"


class Place(NamedTuple):
    """Where a host runs: its address, interface, and the words before its command."""

    address: str
    interface: str = "lo"
    prefix: tuple[str, ...] = ()


HERE = (Place("127.0.0.1"), Place("127.0.0.2"))
Start = Callable[[Path, int, Sequence[Place]], "subprocess.Popen[bytes]"]
"""Starts a host, of a job in a directory, by its number; the last argument has all hosts."""


class Mark(NamedTuple):
    """A line that the script wrote."""

    event: str
    rank: int
    pid: int
    time: float
    step: int
    world_size: int


class NotRecoveredError(Exception):
    """A job did not go on within the limit, or all of its hosts have ended."""


class Run:
    """A job that trains in a directory; `start` starts one of its hosts, which `hosts` lists."""

    def __init__(self, directory: Path, places: Sequence[Place], start: Start) -> None:
        self.directory = directory
        self.start = start
        self._places = places
        self.hosts: list[subprocess.Popen[bytes]] = []

    def begin(self) -> None:
        """Starts all hosts, and waits until they have trained for some seconds."""
        self.hosts = [self.start(self.directory, number, self._places) for number in range(len(self._places))]
        self.await_step(lambda _: True, START_SECONDS)
        time.sleep(WARM_SECONDS if self.start is start_train else RIVAL_WARM_SECONDS)

    def marks(self, event: str) -> list[Mark]:
        """Returns the lines of an event."""
        path = self.directory / "marks"
        lines = path.read_text().splitlines() if path.exists() else []
        words = [line.split() for line in lines if line.startswith(f"{event} ")]
        return [
            Mark(word[0], int(word[1]), int(word[2]), float(word[3]), int(word[4]), int(word[5]))
            for word in words
            if len(word) == 6
        ]

    def await_step(self, wanted: Callable[[Mark], bool], seconds: float = LIMIT_SECONDS) -> Mark:
        """Waits for a completed step of rank 0."""
        deadline = time.monotonic() + seconds
        while True:
            found = next((mark for mark in self.marks("step") if mark.rank == 0 and wanted(mark)), None)
            if found is not None:
                return found
            if time.monotonic() > deadline or all(host.poll() is not None for host in self.hosts):
                log = (self.directory / "log").read_text()
                raise NotRecoveredError(f"no step within {seconds:.0f} s, or all hosts ended\n{log[-4000:]}")
            time.sleep(0.02)

    def kill_rank(self, rank: int) -> float:
        """Kills the newest process of a rank; returns when."""
        pid = [mark.pid for mark in self.marks("began") if mark.rank == rank][-1]
        now = time.time()
        os.kill(pid, signal.SIGKILL)
        return now

    def await_recovery(self, killed_at: float, world_size: int | None = None) -> Mark:
        """Waits for the first step of a process of rank 0 that began after a failure.

        Args:
            killed_at: When it was.
            world_size: The number of ranks of the step. None: any.
        """
        before = {mark.pid for mark in self.marks("began") if mark.time < killed_at}
        return self.await_step(
            lambda mark: mark.time > killed_at and mark.pid not in before and world_size in (None, mark.world_size)
        )

    def lose_host(self, number: int) -> float:
        """Kills a host with everything that it started; returns when."""
        pids = [self.hosts[number].pid, *descendants(self.hosts[number].pid)]
        now = time.time()
        for pid in pids:
            kill(pid)
        self.hosts[number].wait()
        return now

    def start_host(self, number: int) -> float:
        """Starts a lost host again; returns when."""
        now = time.time()
        self.hosts[number] = self.start(self.directory, number, self._places)
        return now

    def end(self) -> None:
        """Kills what still runs."""
        for host in self.hosts:
            for pid in [*descendants(host.pid), host.pid]:
                kill(pid)
            host.wait()


def descendants(pid: int) -> list[int]:
    """Return the child processes of a process, their child processes and so on."""
    try:
        found = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
    return [*found, *(below for child in found for below in descendants(child))]


def kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def main(arguments: Sequence[str]) -> int:
    """Measure, and return the exit code."""
    parser = make_parser(__doc__, ROUNDS)
    parser.add_argument(
        "--seconds", type=int, default=GOODPUT_SECONDS, help="how long to measure goodput (%(default)s)"
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure (all)")
    options = parser.parse_args(arguments)
    print_machine()
    print(f"rounds: {options.rounds} (medians), parts: {', '.join(options.parts)}")
    return finish(figure for part in options.parts for figure in measure(part, options.rounds, options.seconds))


def measure(part: str, rounds: int, seconds: int) -> Iterator[Figure]:
    """Measure both sides of a part, and yield its figures."""
    if part == "rank":
        yield from measure_lost_ranks(rounds)
    elif part == "host":
        yield from compare_pairs(("host-killed", "host-replaced"), replace_host, rounds, 0.3)
    elif part == "elastic":
        yield from compare_pairs(("elastic-4-to-3", "elastic-3-to-4"), lose_and_return, rounds, 0.5)
    elif part == "goodput":
        shares = [lose_share(start, seconds) for start in (start_train, start_torchrun)]
        yield Figure("lost-share", shares[0], "", 0.15, shares[1], "torchrun", 1.0)
    else:
        yield from resume_save.measure(rounds, Path.cwd())


def measure_lost_ranks(rounds: int) -> Iterator[Figure]:
    """Measure the restart after a killed rank, and its parts."""
    ours: list[float] = []
    rival: list[float] = []
    parts: list[dict[str, float]] = []
    for _ in range(rounds):
        with running(HERE[:1], start_train) as run:
            killed_at = run.kill_rank(1)
            step = run.await_recovery(killed_at)
            ours.append(step.time - killed_at)
            parts.append(split(run, killed_at, step.pid))
        with running(HERE[:1], start_torchrun) as run:
            killed_at = run.kill_rank(1)
            rival.append(recovery(run, killed_at))
    yield compare("rank-killed", ours, rival, 3.0, 0.3)
    if importlib.util.find_spec("torchft"):
        groups = [lose_group() for _ in range(rounds)]
        for name, seconds in zip(("rank-killed-torchft", "rank-restored-torchft"), zip(*groups, strict=True)):
            yield compare(name, ours, seconds, None, None, "torchft")
    for name in parts[0]:
        yield Figure(f"rank-killed-{name}", statistics.median(each[name] for each in parts), "s")


def compare_pairs(
    names: tuple[str, str], measure_pair: Callable[[Start], tuple[float, float]], rounds: int, ceiling: float
) -> Iterator[Figure]:
    """Measure two figures in each round, of both sides."""
    sides = [[measure_pair(start) for _ in range(rounds)] for start in (start_train, start_elastic)]
    for number, name in enumerate(names):
        ours, rival = ([each[number] for each in side] for side in sides)
        yield compare(name, ours, rival, None, ceiling)


def compare(
    name: str,
    ours: Sequence[float],
    rival: Sequence[float],
    goal: float | None,
    ceiling: float | None,
    rival_name: str = "torchrun",
) -> Figure:
    """Print the spread, and return the figure of the medians."""
    spread = f"{min(ours):.3f} .. {max(ours):.3f} s, {rival_name} {min(rival):.3f} .. {max(rival):.3f} s"
    print(f"{name}: {spread}", flush=True)
    return Figure(name, statistics.median(ours), "s", goal, statistics.median(rival), rival_name, ceiling)


@contextmanager
def running(places: Sequence[Place], start: Start) -> Iterator[Run]:
    """Start a job that has trained for some seconds, and end it in any case."""
    with tempfile.TemporaryDirectory() as directory:
        run = Run(Path(directory), places, start)
        try:
            run.begin()
            yield run
        finally:
            run.end()


def split(run: Run, killed_at: float, pid: int) -> dict[str, float]:
    """Return the parts of a restart: the times between the events of the new process of rank 0."""
    events = {"until-script-runs": "began", "imports": "imported", "load": "loaded", "first-step": "step"}
    times = [next(mark.time for mark in run.marks(event) if mark.pid == pid) for event in events.values()]
    return {name: end - begin for name, begin, end in zip(events, [killed_at, *times], times)}


def replace_host(start: Start) -> tuple[float, float]:
    """Return the seconds from the loss of the second host until the next step, and until the next step of both hosts.

    The second host is started again at once.
    """
    with running(HERE, start) as run:
        killed_at = run.lose_host(1)
        run.start_host(1)
        return recovery(run, killed_at), recovery(run, killed_at, 2)


def lose_and_return(start: Start) -> tuple[float, float]:
    """Return the seconds until the next step of 3 hosts when one of 4 is lost, and of 4 when it is started again."""
    with ExitStack() as undo:
        hosts = undo.enter_context(switched_hosts(4))
        run = undo.enter_context(running([Place(each.address, INTERFACE, (*each.command(),)) for each in hosts], start))
        lost = recovery(run, run.lose_host(3), 3)
        time.sleep(WARM_SECONDS)
        return lost, recovery(run, run.start_host(3), 4)


def recovery(run: Run, since: float, world_size: int | None = None) -> float:
    """Return the seconds until a step of restarted ranks. If the job does not go on, return the limit."""
    return seconds_until(run, since, lambda: run.await_recovery(since, world_size))


def seconds_until(run: Run, since: float, await_mark: Callable[[], Mark]) -> float:
    """Return the seconds until the mark that is awaited. If the job does not go on, return the limit."""
    try:
        return await_mark().time - since
    except NotRecoveredError as error:
        print(f"{run.start.__name__}: the job did not go on: {error}", flush=True)
        return LIMIT_SECONDS


def lose_group() -> tuple[float, float]:
    """Return the seconds from the loss of torchft's second rank until the next step, and the next step of both."""
    with running(HERE, start_torchft) as run:
        run.await_step(lambda mark: mark.world_size == 2, START_SECONDS)
        killed_at = run.kill_rank(1)
        alone = seconds_until(
            run, killed_at, lambda: run.await_step(lambda mark: mark.time > killed_at and mark.world_size == 1)
        )
        both = seconds_until(
            run, killed_at, lambda: run.await_step(lambda mark: mark.time > killed_at + alone and mark.world_size == 2)
        )
        return alone, both


def lose_share(start: Start, seconds: int) -> float:
    """Return the share of the time that is lost with a killed rank every 15 s."""
    with running(HERE[:1], start) as run:
        began = run.marks("step")[0]
        steady = [mark.time for mark in run.marks("step") if mark.rank == 0]
        usual = statistics.median(after - before for before, after in itertools.pairwise(steady))
        end = began.time + seconds
        while (now := time.time()) < end:
            time.sleep(min(EVERY_SECONDS, end - now))
            if time.time() < end - 1:
                run.kill_rank(1)
        last = max(mark.step for mark in run.marks("step") if mark.rank == 0 and mark.time < end)
    goodput = last * usual / seconds
    print(
        f"goodput of {start.__name__.removeprefix('start_')}: {goodput:.3f}, {last} steps of {usual:.4f} s", flush=True
    )
    return 1 - goodput


def start_train(directory: Path, number: int, places: Sequence[Place]) -> subprocess.Popen[bytes]:
    """Start `train` on a host of a job."""
    place, hosts = places[number], len(places)
    base = directory / place.address
    (base / "code").mkdir(parents=True, exist_ok=True)
    (base / "code" / "train.py").write_bytes(SCRIPT.read_bytes())
    config = base / "input" / "config"
    config.mkdir(parents=True, exist_ok=True)
    values = {
        "sagemaker_torch_distributed_enabled": True,
        "sagemaker_mpi_num_of_processes_per_host": max(2 // hosts, 1),
    }
    (config / "hyperparameters.json").write_text(json.dumps({key: json.dumps(value) for key, value in values.items()}))
    names = [each.address for each in places]
    resources = {"current_host": place.address, "hosts": names, "network_interface_name": place.interface}
    (config / "resourceconfig.json").write_text(json.dumps(resources))
    variables = {
        "SAGEMAKER_BASE_DIR": str(base),
        "SAGEMAKER_PROGRAM": "train.py",
        "SHOAL_MAX_RESTARTS": "1000",
        "SHOAL_AGENT_PORT": str(port_of(directory, "agent")),
        "MASTER_PORT": str(port_of(directory, "master")),
        **({"SHOAL_MIN_HOSTS": str(LEAST[hosts])} if hosts in LEAST else {}),
    }
    return start_process([*place.prefix, sys.executable, "-m", "shoal_toolkit"], directory, variables)


def start_torchrun(directory: Path, number: int, places: Sequence[Place]) -> subprocess.Popen[bytes]:
    """Start torchrun on one host."""
    options = ["--standalone", "--nproc-per-node=2", "--max-restarts=1000", "--monitor-interval=0.1"]
    return start_process([sys.executable, "-m", "torch.distributed.run", *options, str(SCRIPT)], directory, OWN_STORE)


def start_torchft(directory: Path, number: int, places: Sequence[Place]) -> subprocess.Popen[bytes]:
    """Start one of torchft's groups of a rank, with a torchrun that starts the rank again."""
    options = ["--standalone", "--nproc-per-node=1", "--max-restarts=1000", "--monitor-interval=0.1"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, str(TORCHFT_SCRIPT)]
    variables = {"RESUME_GROUP": str(number), "RESUME_LIGHTHOUSE_PORT": str(port_of(directory, "lighthouse"))}
    return start_process(command, directory, variables)


def start_elastic(directory: Path, number: int, places: Sequence[Place]) -> subprocess.Popen[bytes]:
    """Start torchrun with a rendezvous on one of the hosts; the first serves it."""
    place, hosts = places[number], len(places)
    endpoint = f"{places[0].address}:{port_of(directory, 'rendezvous')}"
    conf = f"--rdzv-conf=is_host={int(number == 0)},{RENDEZVOUS}"
    rendezvous = ["--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", "--rdzv-id=bench", conf]
    rendezvous.append(f"--local-addr={place.address}")
    options = [
        f"--nnodes={LEAST[hosts]}:{hosts}",
        "--nproc-per-node=1",
        "--max-restarts=1000",
        "--monitor-interval=0.1",
    ]
    command = [*place.prefix, sys.executable, "-m", "torch.distributed.run", *options, *rendezvous, str(SCRIPT)]
    variables = {**OWN_STORE, "GLOO_SOCKET_IFNAME": place.interface}
    return start_process(command, directory, variables)


def start_process(command: Sequence[str], directory: Path, variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a command. Its output goes to the log of the job."""
    shared = {"RESUME_DIRECTORY": str(directory), "RESUME_STEPS": FOREVER, "OMP_NUM_THREADS": "1"}
    with (directory / "log").open("ab") as log:
        return subprocess.Popen(command, env={**os.environ, **shared, **variables}, stdout=log, stderr=log)


def port_of(directory: Path, name: str) -> int:
    """Return a port that was free when the job first asked for it by this name."""
    path = directory / f"{name}.port"
    if not path.exists():
        with socket.create_server(("", 0)) as probe:
            path.write_text(str(probe.getsockname()[1]))
    return int(path.read_text())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
