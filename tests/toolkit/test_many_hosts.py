"""A job on eight hosts, each a network namespace, and what each of them costs the first host."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

import pytest

from .netns import UNAVAILABLE, Host, init_of, many_hosts, running
from .test_two_hosts import script, wait_until

pytestmark = [pytest.mark.mpi, pytest.mark.skipif(bool(UNAVAILABLE), reason=UNAVAILABLE)]

HOSTS = 8
FILES_PER_HOST = 2  # a connection of `train`, and one of mpirun
WAIT = "import os, time\nopen('up', 'w')\nwhile not os.path.exists({!r}): time.sleep(0.02)"


def test_each_host_costs_the_first_one_two_open_files_and_no_process(tmp_path: Path) -> None:
    """The agents through which mpirun starts its daemons have ended by the time that all ranks run."""
    with many_hosts(tmp_path, HOSTS) as hosts:
        script(hosts, WAIT.format(str(tmp_path / "end")))
        on_two, on_all = (run_and_look(hosts[:count], tmp_path / "end") for count in (2, HOSTS))
    assert sorted(on_two) == sorted(on_all), "the same processes"
    more = sum(on_all.values()) - sum(on_two.values())
    assert more <= FILES_PER_HOST * (HOSTS - 2), (on_two, on_all)


@pytest.mark.parametrize("wrapped", [False, True])
def test_ranks_may_open_as_many_files_as_train(tmp_path: Path, wrapped: bool) -> None:
    """mpirun, or a script that starts it, has a lower limit while it starts its daemons. A third host runs no rank."""
    limits, programs = tmp_path / "limits", tmp_path / "bin"
    programs.mkdir(0o755)
    mpirun = Path(sys.executable).with_name("mpirun")
    if wrapped:
        (programs / "mpirun").write_text(f'#!/bin/sh\nexport HOST=$(hostname)\n{mpirun} "$@"\n')
        (programs / "mpirun").chmod(0o755)
    with many_hosts(tmp_path, 3) as hosts:
        look = f"import resource\nwith open('{limits}', 'a') as file: print(resource.getrlimit(7)[0], file=file)"
        script(hosts, look, sagemaker_distribution_instance_groups=["ranks"])
        names = [host.name for host in hosts]
        parts = {"ranks": names[:2], "others": names[2:]}
        groups = [
            {"instance_group_name": name, "instance_type": "ml.c5.large", "hosts": part} for name, part in parts.items()
        ]
        for host in hosts:
            own = next(name for name, part in parts.items() if host.name in part)
            host.tree.hosts(
                host.name, *names, network_interface_name="eth0", instance_groups=groups, current_group_name=own
            )
        processes = [host.start(PATH=f"{programs}:{os.environ['PATH']}") for host in hosts]
        with running(*processes):
            done = [host.finished(process) for host, process in zip(hosts, processes)]
    assert [each.code for each in done] == [0, 0, 0], done
    assert limits.read_text().split() == [str(resource.getrlimit(resource.RLIMIT_NOFILE)[0])] * 3


def run_and_look(hosts: list[Host], end: Path) -> dict[str, int]:
    """Runs the job on some of the hosts. Returns the open files of each process on the first one while ranks run."""
    end.unlink(missing_ok=True)
    ups = [host.tree.code / "up" for host in hosts]
    for host, up in zip(hosts, ups):
        up.unlink(missing_ok=True)
        host.tree.hosts(host.name, *(other.name for other in hosts), network_interface_name="eth0")
    processes = [host.start() for host in hosts]
    with running(*processes):
        wait_until(lambda: all(up.exists() for up in ups))
        first = init_of(processes[0])
        wait_until(lambda: not any("rsh.sh" in command for command in list_open_files(first)))
        found = list_open_files(first)
        end.touch()
        assert {host.finished(process).code for host, process in zip(hosts, processes)} == {0}
    return found


def list_open_files(pid: int) -> dict[str, int]:
    """Returns how many files a process and its descendants have open, by command and place in the tree."""
    process = Path(f"/proc/{pid}")
    words = process.joinpath("cmdline").read_text().split("\0")[:2]
    found = {" ".join(Path(word).name for word in words): len(list(process.joinpath("fd").iterdir()))}
    for number, child in enumerate(process.joinpath(f"task/{pid}/children").read_text().split()):
        found |= {f"{number} {name}": files for name, files in list_open_files(int(child)).items()}
    return found
