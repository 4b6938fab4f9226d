"""Stops, and scripts that leave something behind: a host's PID 1 is `train`."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from ..repeats import in_soak
from .cases import EITHER_HOST, WHICH, launchers
from .job import MPI, PROCESS, TORCHRUN, Job, Launcher, run_inside, until
from .scripts import TRAIN_FOR_LONG, script
from .start import StartJob
from .table import Table

STOPPED = "The job was stopped: `train` received SIGTERM"
SAVES = script(
    "def save(*_):\n"
    "    time.sleep(2)\n"
    "    mark('saved')\n"
    "    sys.exit()\n"
    "signal.signal(signal.SIGTERM, save)\n"
    "mark('ready')\n"
    "while True:\n"
    "    time.sleep(0.1)\n"
)
IGNORES = script(
    "signal.signal(signal.SIGTERM, lambda *_: mark('told'))\nmark('ready')\nwhile True:\n    time.sleep(0.1)\n"
)


def stop(job: Job, *names: str) -> float:
    """Stop hosts as `docker stop -t 60` does, all at once; returns when that began."""
    since = time.time()
    with ThreadPoolExecutor() as threads:
        list(threads.map(lambda name: job.container(name).stop(timeout=60), names))
    return since


def stops() -> Iterator[Any]:
    """Yield launchers, and the hosts that are stopped. In the suite, all of MPI, and every host of the others."""
    for launcher in (PROCESS, MPI, TORCHRUN):
        for told in (["algo-1"], ["algo-2"], ["algo-1", "algo-2"]):
            yield (launcher, told) if launcher is MPI or len(told) == 2 else in_soak(launcher, told)


@pytest.mark.parametrize(
    ("launcher", "told"),
    list(stops()),
    ids=lambda value: value.name if isinstance(value, Launcher) else "+".join(value),
)
def test_a_stopped_job_saves_on_every_rank(start: StartJob, table: Table, launcher: Launcher, told: list[str]) -> None:
    ranks = 2 if launcher is PROCESS else 4
    job = start(SAVES, launcher, ranks=2)
    job.marks("ready", ranks)
    stop(job, *told)
    since = max(job.marks("saved", ranks).values())
    which = WHICH[told[0]] if len(told) == 1 else "every host"
    table.failed(f"{which} is stopped (SIGTERM; from the last rank's checkpoint)", job, since, codes=143, says=STOPPED)


@launchers(PROCESS, MPI, soak=(TORCHRUN,))
def test_a_script_that_ignores_sigterm_is_killed_after_the_grace(
    start: StartJob, table: Table, launcher: Launcher
) -> None:
    job = start(IGNORES, launcher, SHOAL_STOP_GRACE="4")
    job.marks("ready", 2)
    since = stop(job, *WHICH)
    fault = "the script ignores SIGTERM (`docker stop`; from the end of SHOAL_STOP_GRACE)"
    table.failed(fault, job, since + 4, codes=143, says=STOPPED, bar=2)


@EITHER_HOST
@launchers(PROCESS, MPI, soak=(TORCHRUN,))
def test_a_second_signal_kills_at_once(start: StartJob, table: Table, launcher: Launcher, host: str) -> None:
    job = start(IGNORES, launcher)
    job.marks("ready", 2)
    job.container(host).kill(signal.SIGTERM)
    job.marks("told", 2)
    time.sleep(2)  # one that follows at once is an echo of the first
    since = time.time()
    job.container(host).kill(signal.SIGTERM)
    table.failed(f"{WHICH[host]} gets a second SIGTERM", job, since, codes=143, says=STOPPED, bar=2)


@EITHER_HOST
def test_a_host_that_waits_for_others_stops_at_once(start: StartJob, table: Table, host: str) -> None:
    job = start(TRAIN_FOR_LONG, only=[host])
    job.printed(host, "launcher mpi")
    since = stop(job, host)
    table.failed(f"{WHICH[host]} is stopped while it waits for others", job, since, codes=143, says=STOPPED, bar=2)


@launchers(PROCESS, MPI, soak=(TORCHRUN,))
def test_what_a_script_leaves_behind_keeps_nobody(start: StartJob, table: Table, launcher: Launcher) -> None:
    """A daemon with the script's own stdout, which never ends."""
    text = "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        time.sleep(300)\n    os._exit(0)\n"
    job = start(script(f"{text}os.wait()\nmark('done')\n"), launcher)
    table.survived("the script leaves a daemon behind", job, max(job.marks("done", 2).values()))


@launchers(PROCESS, soak=(MPI,))
def test_orphans_are_reaped(start: StartJob, table: Table, launcher: Launcher) -> None:
    orphans = (
        "for _ in range(50):\n"
        "    if os.fork() == 0:\n"
        "        if os.fork() == 0:\n"
        "            time.sleep(0.2)\n"
        "        os._exit(0)\n"
        "    os.wait()\n"
        "mark('forked')\n"
        "while not pathlib.Path('end').exists():\n"
        "    time.sleep(0.1)\n"
    )
    job = start(script(orphans), launcher, hosts=["algo-1"])
    since = job.marks("forked", 1)[0] + 0.2
    until(lambda: time.time() > since and not zombies(job), lambda: f"zombies: {zombies(job)}")
    table.note("50 orphans end: until none is a zombie", launcher.name, {}, time.time() - since, 5, "")
    table.check()
    job.hosts["algo-1"].path("code/end").touch()
    assert job.ends()["algo-1"].code == 0


def zombies(job: Job) -> list[str]:
    """The dead processes of the first host that nobody has waited for."""
    _, output = run_inside(job.container("algo-1"), "sh", "-c", "cat /proc/[0-9]*/stat 2>/dev/null")
    return [line for line in output.splitlines() if line.rpartition(")")[2].split()[:1] == ["Z"]]
