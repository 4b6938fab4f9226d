"""Jobs one after the other and side by side on machines that stay: `train` is not PID 1, and leaves nothing behind."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from ..repeats import in_soak, times
from .cases import launchers
from .job import MPI, PROCESS, TORCHRUN, Launcher, send, until
from .machine import Machine
from .scripts import script
from .start import StartJob
from .table import LOST, NOTICED, Table

TIMES = times(10, 200)
SECONDS_EACH = 0.75
LOOP = """\
for job in $(seq {times}); do
    train >>/opt/ml/log 2>&1
    echo "$? $(cd /opt/ml/output && ls -d failure success 2>/dev/null)" >>/opt/ml/ends
done
"""


@pytest.mark.soak
def test_a_job_of_a_moment_many_times_in_a_row(start: StartJob, table: Table) -> None:
    names = ("algo-1", "algo-2")
    machines = [start.machine(name) for name in names]
    for machine in machines:
        machine.lay_out("", "open('/opt/ml/ran', 'a').write('x')\n", MPI, hosts=names)
    began = time.time()
    runs = [machine.run("sh", "-c", LOOP.format(times=TIMES)) for machine in machines]
    for run in runs:
        run.wait(300)
    seconds = time.time() - began
    ends = {machine.name: machine.host.path("ends").read_text().splitlines() for machine in machines}
    codes = {name: max(int(end.split()[0]) for end in lines) for name, lines in ends.items()}
    table.note(
        "a job of a moment on two hosts, many times in a row (in all)",
        "MPI",
        codes,
        seconds,
        TIMES * SECONDS_EACH,
        "",
    )
    table.remark(f"{TIMES} times")
    for machine in machines:
        assert ends[machine.name] == ["0 success"] * TIMES, machine.host.path("log").read_text()[-3000:]
        assert len(machine.host.path("ran").read_text()) == TIMES
        machine.is_clean()
    table.check()


@pytest.fixture
def machine(start: StartJob) -> Machine:
    return start.machine("algo-1")


def wait_for(tree: Path, event: str, ranks: int = 2) -> float:
    """Waits until that many ranks of a job have marked an event; returns when the last did."""
    marks = tree / "checkpoints"
    log = tree / "log"
    until(lambda: len(list(marks.glob(f"{event}.*"))) >= ranks, lambda: log.read_text() if log.exists() else "")
    return max(float(mark.read_text()) for mark in marks.glob(f"{event}.*"))


UNTIL_TOLD = "while not pathlib.Path('end').exists():\n    time.sleep(0.1)\nmark('done')\n"
TOGETHER = {
    "MPI": f"from mpi4py import MPI\nassert MPI.COMM_WORLD.allreduce(1) == 2\n{UNTIL_TOLD}",
    "torchrun": f"assert os.environ['WORLD_SIZE'] == '2'\n{UNTIL_TOLD}",
}


@pytest.mark.parametrize(
    "both", [(MPI, MPI), (TORCHRUN, TORCHRUN), in_soak((MPI, TORCHRUN))], ids=lambda both: "+".join(map(str, both))
)
def test_two_jobs_on_one_machine_do_not_meet(machine: Machine, table: Table, both: tuple[Launcher, Launcher]) -> None:
    bases = ("a", "b")
    trees = [machine.lay_out(base, script(TOGETHER[launcher.name]), launcher, 2) for base, launcher in zip(bases, both)]
    runs = [machine.train(base) for base in bases]
    for tree in trees:
        wait_for(tree, "up")
    for tree in trees:
        (tree / "code" / "end").touch()
    codes = {base: run.wait() for base, run in zip(bases, runs)}
    seconds = time.time() - max(wait_for(tree, "done") for tree in trees)
    fault = f"two jobs on one machine at once{'' if len(set(map(str, both))) == 1 else ', one of each'}"
    table.note(fault, both[1].name, codes, seconds, LOST, "")
    assert codes == {"a": 0, "b": 0}, [(tree / "log").read_text() for tree in trees]
    machine.is_clean()
    table.check()


@launchers(PROCESS, MPI, soak=(TORCHRUN,))
def test_a_job_that_fails_leaves_the_one_beside_it_alone(machine: Machine, table: Table, launcher: Launcher) -> None:
    fails = "if RANK == 0:\n    mark('fails'); sys.exit(3)\ntime.sleep(300)\n"
    ranks = 1 if launcher is PROCESS else 2
    lasting = machine.lay_out("lasting", script(UNTIL_TOLD), MPI, 2)
    failing = machine.lay_out("failing", script(fails), launcher, ranks)
    other = machine.train("lasting")
    wait_for(lasting, "up")
    code = machine.train("failing").wait()
    seconds = time.time() - wait_for(failing, "fails", 1)
    says = (failing / "output" / "failure").read_text().partition("\n")[0]
    table.note("a rank fails beside another job, which goes on", launcher.name, {"": code}, seconds, NOTICED, says)
    assert code == 3
    assert not (failing / "output" / "success").exists()
    (lasting / "code" / "end").touch()
    assert other.wait() == 0, (lasting / "log").read_text()
    machine.is_clean()


LEFT = {
    "a child in the background": "os.fork() or time.sleep(300)\n",
    "a daemon": "if os.fork() == 0:\n    os.setsid()\n    os.fork() or time.sleep(300)\n    os._exit(0)\n",
}


@pytest.mark.parametrize("what", LEFT)
@launchers(PROCESS, MPI, soak=(TORCHRUN,))
def test_what_a_script_leaves_behind_is_ended(machine: Machine, table: Table, launcher: Launcher, what: str) -> None:
    ranks = 1 if launcher is PROCESS else 2
    tree = machine.lay_out("job", script(f"{LEFT[what]}mark('done')\n"), launcher, ranks)
    code = machine.train("job").wait()
    seconds = time.time() - wait_for(tree, "done", ranks)
    table.note(f"the script leaves {what} on a machine", launcher.name, {"": code}, seconds, LOST, "")
    assert code == 0, (tree / "log").read_text()
    machine.is_clean()
    table.check()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
@launchers(PROCESS, MPI)
def test_a_stop_leaves_nothing_running(
    machine: Machine, table: Table, launcher: Launcher, number: signal.Signals
) -> None:
    ranks = 1 if launcher is PROCESS else 2
    ignores = "for number in (signal.SIGTERM, signal.SIGINT):\n    signal.signal(number, signal.SIG_IGN)\n"
    tree = machine.lay_out("job", script(f"{ignores}mark('ready')\ntime.sleep(300)\n"), launcher, ranks)
    run = machine.train("job", SHOAL_STOP_GRACE="2")
    wait_for(tree, "ready", ranks)
    since = send(machine.host.engines, "/train", number) + 2
    code = run.wait()
    fault = f"{number.name} on a machine, and the script ignores it (from the end of SHOAL_STOP_GRACE)"
    says = (tree / "output" / "failure").read_text().partition("\n")[0]
    table.note(fault, launcher.name, {"": code}, time.time() - since, 2, says)
    assert code == 128 + number
    machine.is_clean()
    table.check()
