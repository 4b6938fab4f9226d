"""Machines with too little disk or memory, or a wrong clock, and large configurations."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docker
import pytest
from docker.models.volumes import Volume

from ..containers import Host
from . import scripts
from .cases import EITHER_HOST, WHICH, launchers
from .job import MPI, PROCESS, TORCHRUN, Launcher, run_inside
from .scripts import TRAIN_A_LITTLE, TRAIN_FOR_LONG, script
from .start import StartJob
from .table import Table

FILL_THE_DISK = """\
if os.environ["SM_CURRENT_HOST"] == {host!r}:
    try:
        with open(os.path.join(os.environ["SM_OUTPUT_DATA_DIR"], "large"), "wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 12))
    except OSError as error:
        mark("full")
        if {raises}:
            raise
elif {raises}:
    time.sleep(300)
"""
MEBIBYTE = 1 << 20


@pytest.fixture
def small_disk(client: docker.DockerClient) -> Iterator[Volume]:
    volume = client.volumes.create(driver_opts={"type": "tmpfs", "device": "tmpfs", "o": "size=256k"})
    yield volume
    volume.remove()


class Keeper:
    """Keeps a disk in memory from being emptied when the host that writes on it ends."""

    def __init__(self, start: StartJob, disk: Volume) -> None:
        self.options = {"volumes": {disk.name: "/opt/ml/output"}}
        self._container = start.beside("sleep", "300", **self.options).engines

    def hand_over(self, host: Host) -> None:
        """Bring a host's result files to where they are looked for."""
        host.wait()
        for name in ("failure", "success"):
            code, text = run_inside(self._container, "cat", f"/opt/ml/output/{name}")
            if code == 0:
                host.path(f"output/{name}").write_text(text)


@pytest.mark.parametrize("raises", [True, False])
@EITHER_HOST
def test_a_full_disk_fails_the_job(small_disk: Volume, start: StartJob, table: Table, host: str, raises: bool) -> None:
    keeper = Keeper(start, small_disk)
    text = script(FILL_THE_DISK.format(host=host, raises=raises))
    job = start(text, PROCESS, options={host: keeper.options})
    (since,) = job.marks("full", 1).values()
    keeper.hand_over(job.hosts[host])
    fault = f"the disk is full under /opt/ml/output of {WHICH[host]}" + (
        "" if raises else ", and the script ignores the error"
    )
    says = ["No space left on device"] if raises else ["cannot be recorded", "could not be written"]
    table.failed(fault, job, since, codes=1, says=says)


@EITHER_HOST
@launchers(PROCESS, soak=(MPI,))
def test_a_read_only_directory_fails_the_job(start: StartJob, table: Table, launcher: Launcher, host: str) -> None:
    job = start(TRAIN_FOR_LONG, launcher, options={host: {"mode": "ro"}})
    since = max(job.started(name) for name in WHICH)
    says = "The output directory cannot be written"
    table.failed(f"/opt/ml of {WHICH[host]} is read-only", job, since, codes=1, says=says, silent=[host])
    assert says in job.ends()[host].output


@launchers(MPI, soak=(PROCESS,))
def test_a_read_only_root_is_survived(start: StartJob, table: Table, launcher: Launcher) -> None:
    job = start(TRAIN_A_LITTLE, launcher, options={name: {"read_only": True} for name in WHICH})
    table.survived("everything but /opt/ml is read-only", job, job.up() + 2)


@launchers(MPI, soak=(PROCESS,))
def test_a_rank_over_the_memory_limit_is_named(start: StartJob, table: Table, launcher: Launcher) -> None:
    # In one go: near the limit, the kernel first takes away the pages of the programs themselves.
    eats = "if RANK == 1:\n    eaten = b'x' * (1 << 30)\ntime.sleep(300)\n"
    limits = {"mem_limit": "200m", "memswap_limit": "200m"}
    job = start(script(eats), launcher, options={"algo-2": limits})
    since = job.out_of_memory("algo-2")
    table.failed("the memory limit of the container is hit", job, since, codes=137, says="memory")


@launchers(PROCESS, MPI, soak=(TORCHRUN,))
def test_many_hyperparameters_reach_the_script(start: StartJob, table: Table, launcher: Launcher) -> None:
    values = {f"name-{number:03}": "v" * 230 for number in range(600)}
    text = (
        "read = dict(zip((word[2:] for word in sys.argv[1::2]), sys.argv[2::2]))\n"
        "assert read == {f'name-{number:03}': 'v' * 230 for number in range(600)}, len(sys.argv)\n"
        "mark('done')\n"
    )
    job = start(script(text), launcher, hyperparameters=values)
    table.survived("144 KB of hyperparameters", job, max(job.marks("done", 2).values()))


@launchers(PROCESS, soak=(MPI,))
def test_a_hyperparameter_that_linux_cannot_pass_is_named(start: StartJob, table: Table, launcher: Launcher) -> None:
    job = start(TRAIN_FOR_LONG, launcher, hyperparameters={"large": "v" * 144_000})
    since = max(job.started(name) for name in WHICH)
    table.failed(
        "one hyperparameter of 144 KB", job, since, codes=2, says="hyperparameters.json: large is 144,000 bytes"
    )


MANY = tuple(f"algo-{number}" for number in range(1, 601))


@launchers(MPI, soak=(PROCESS,))
def test_most_of_600_hosts_are_missing(start: StartJob, table: Table, launcher: Launcher) -> None:
    missing = {"extra_hosts": dict.fromkeys(MANY[2:], "127.0.0.9")}
    options = dict.fromkeys(WHICH, missing)
    job = start(TRAIN_FOR_LONG, launcher, hosts=MANY, only=list(WHICH), options=options, SHOAL_HOSTS_TIMEOUT="10")
    job.printed("algo-1", "launcher")
    used = job.use("algo-1", 3)  # well before the 10 s are over, even if the machine is busy
    since = job.started("algo-1") + 10
    fault = "598 of 600 hosts never start (from the end of SHOAL_HOSTS_TIMEOUT)"
    table.failed(fault, job, since, codes=1, says="algo-3 (")  # it may just be looked up, between two tries
    failure = job.ends()["algo-1"].failure
    assert "(Connection refused)" in failure
    assert "and 588 more" in failure
    table.remark(f"`train` takes {used.memory / MEBIBYTE:.0f} MiB and {used.cpu:.0%} of a core meanwhile")
    # 18 MiB and 7 % on an idle machine. Without longer pauses between the tries it would be 89 % of a core, and 67 %
    # beside four busy programs on two cores.
    assert used.memory <= 24 * MEBIBYTE
    assert used.cpu <= 0.25


def test_a_job_of_600_hosts_is_planned(start: StartJob) -> None:
    job = start("", MPI, hosts=MANY, only=["algo-1"], options={"algo-1": {"command": ["train", "--explain", "--json"]}})
    ended = job.hosts["algo-1"].wait()
    assert ended.code == 0, ended.output
    plan = json.loads(ended.output)
    hosts = plan["command"][plan["command"].index("--host") + 1]
    assert hosts == ",".join(f"{host}:1" for host in MANY)


@pytest.fixture(scope="session")
def faketime(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of Debian's libfaketime, unpacked from its package."""
    if not shutil.which("apt-get"):
        pytest.skip("libfaketime is taken from Debian's package, with apt-get")
    directory = tmp_path_factory.mktemp("faketime")
    subprocess.run(["apt-get", "download", "-qq", "libfaketime"], cwd=directory, check=True)
    (package,) = directory.glob("*.deb")
    subprocess.run(["dpkg-deb", "-x", package, directory], check=True)
    (library,) = directory.rglob("libfaketimeMT.so.1")
    return library.parent


@pytest.fixture
def offset(tmp_path: Path) -> Path:
    """The file that says how wrong the clock is."""
    file = tmp_path / "offset"
    file.write_text("+0")
    return file


@pytest.fixture
def wrong_clock(faketime: Path, offset: Path, tmp_path: Path) -> dict[str, Any]:
    """Options for a host with a clock that is off by the number in that file."""
    patch = tmp_path / "patch"
    patch.mkdir()
    (patch / "sitecustomize.py").write_text(scripts.SLEEP)
    env = {
        "LD_PRELOAD": "/faketime/libfaketimeMT.so.1",
        "FAKETIME_TIMESTAMP_FILE": "/offset",
        "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "PYTHONPATH": "/patch",
    }
    return {"volumes": {faketime: "/faketime", offset: "/offset", patch: "/patch"}, "env": env}


@launchers(PROCESS, MPI, soak=(TORCHRUN,))
def test_a_wrong_clock_changes_nothing(
    start: StartJob, table: Table, offset: Path, wrong_clock: dict[str, Any], launcher: Launcher
) -> None:
    offset.write_text("+1d")
    job = start(TRAIN_A_LITTLE, launcher, options={"algo-2": wrong_clock})
    up = job.marks("up", 2)
    assert up[1] > up[0] + 80_000
    table.survived("the clock of a worker is a day ahead", job, up[0] + 2)


@EITHER_HOST
def test_a_clock_that_is_set_changes_nothing(
    start: StartJob, table: Table, offset: Path, wrong_clock: dict[str, Any], host: str
) -> None:
    text = "for _ in range(50):\n    time.sleep(0.1)\nmark('done')\n"
    job = start(script(text), options={host: wrong_clock})
    since = job.up() + 5
    offset.write_text("-1h")
    table.survived(f"the clock of {WHICH[host]} is set back by an hour while it trains", job, since)
    assert job.marks("done", 2)[list(WHICH).index(host)] < since - 3000
