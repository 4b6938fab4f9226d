"""Hosts that end while others run: lost ones are started again, and those that outlive the others are stopped."""

from __future__ import annotations

import io
import itertools
import queue
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from shoal.errors import DockerError
from shoal.jobs import run
from shoal.jobs.job import JobRequest
from shoal.jobs.run import Arrival, HostExit

RESULT, LOST, STOPPED = True, False, None
End = tuple[int, bool | None]
"""How a container ends: the exit code, and whether with a result. `STOPPED`: when it is stopped."""


class Arrivals(queue.SimpleQueue[Arrival]):
    """Ends of hosts. When none is left and nothing limits the wait, `on_wait` makes the next ones."""

    def __init__(self, on_wait: Callable[[], None]) -> None:
        self._on_wait = on_wait

    def get(self, block: bool = True, timeout: float | None = None) -> Arrival:
        if self.empty() and timeout is None:
            self._on_wait()
        return super().get(block, 0 if timeout is None else timeout)


class FakeHosts:
    """Hosts whose containers end one after the other, as a test says: at first, and after each new start."""

    first = "algo-1"

    def __init__(self, ends: Mapping[str, Iterable[End]], max_restarts: int = 0, min_hosts: int = 0) -> None:
        self.request = JobRequest(
            source=Path(), entry_point="x", hosts=len(ends), max_restarts=max_restarts, min_hosts=min_hosts
        )
        self.console = Console(file=io.StringIO(), width=200)
        self.arrivals: queue.SimpleQueue[Arrival] = Arrivals(self._end_later)
        self.later: list[dict[str, End]] = []
        """Hosts that end together, once others may take as long as they need."""
        self.ids: dict[str, str] = {}
        self.stopped: list[str] = []
        self.created: list[tuple[str, Mapping[str, str]]] = []
        self.listed: list[dict[str, Any]] = []
        self._ends: dict[str, Iterator[End]] = {host: iter(each) for host, each in ends.items()}
        self._current: dict[str, End] = {}
        self._numbers = itertools.count()
        for host in ends:
            self.ids[host] = f"{host} {next(self._numbers)}"
        self.start(*ends)

    def create(self, host: str, environment: Mapping[str, str] | None = None) -> None:
        self.created.append((host, environment or {}))
        self.ids[host] = f"{host} {next(self._numbers)}"

    def start(self, *hosts: str) -> None:
        for host in hosts:
            self._current[host] = next(self._ends[host])
            if self._current[host][1] is not STOPPED:
                self._end(host)

    def end(self, host: str, end: End) -> None:
        self._current[host] = end
        self._end(host)

    def _end_later(self) -> None:
        for host, end in self.later.pop(0).items():
            self.end(host, end)

    def _end(self, host: str) -> None:
        self.arrivals.put((host, self.ids[host], HostExit(self._current[host][0])))

    def stop(self, hosts: Iterable[str]) -> None:
        for host in hosts:
            self.stopped.append(host)
            self._end(host)

    def has_result(self, host: str) -> bool:
        return self._current[host][1] is RESULT

    def read_restarts(self, host: str) -> list[dict[str, Any]]:
        assert host == self.first
        return self.listed


def wait(hosts: FakeHosts) -> tuple[dict[str, int], list[dict[str, Any]]]:
    watched = run.Watch(hosts)
    return {host: end.exit_code for host, end in watched.wait().items()}, watched.restarts


@pytest.fixture(autouse=True)
def _waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "STRAGGLER_SECONDS", 0)
    monkeypatch.setattr(run, "FAREWELL_SECONDS", 0)


def test_host_that_outlives_the_others_is_stopped() -> None:
    hosts = FakeHosts({"algo-1": [(0, RESULT)], "algo-2": [(143, STOPPED)]})
    assert wait(hosts) == ({"algo-1": 0, "algo-2": 143}, [])
    assert hosts.stopped == ["algo-2"]


@pytest.mark.parametrize("end", [(137, LOST), (138, RESULT)], ids=["killed", "lost the first host"])
def test_lost_host_is_replaced_and_the_others_keep_their_containers(end: End) -> None:
    """Also one that has given up the first host, which still waits for it."""
    hosts = FakeHosts({"algo-1": [(0, STOPPED)], "algo-2": [end, (0, STOPPED)], "algo-3": [(0, STOPPED)]}, 1)
    hosts.later = [{"algo-2": (0, RESULT)}]
    assert wait(hosts)[0] == {"algo-1": 0, "algo-2": 0, "algo-3": 0}
    assert [host for host, _ in hosts.created] == ["algo-2"]
    assert hosts.stopped == ["algo-1", "algo-3"]


def test_all_start_again_if_the_first_host_is_lost() -> None:
    ends: dict[str, list[End]] = {"algo-1": [(137, LOST), (0, RESULT)], "algo-2": [(143, STOPPED), (0, RESULT)]}
    hosts = FakeHosts(ends, 3)
    hosts.listed = [{"number": 1, "reason": "a rank", "seconds": 0.4}]
    codes, restarts = wait(hosts)
    assert codes == {"algo-1": 0, "algo-2": 0}
    assert hosts.stopped == ["algo-2"]
    reason = "The first host algo-1 was lost: killed by SIGKILL"
    variables = {"SHOAL_RESTART": "2", "SHOAL_RESTART_REASON": reason}
    assert hosts.created == [("algo-1", variables), ("algo-2", variables)]
    assert restarts[0] == hosts.listed[0]
    assert {**restarts[1], "at": "", "seconds": 0} == {
        "number": 2,
        "at": "",
        "reason": reason,
        "host": "algo-1",
        "seconds": 0,
    }
    assert f"{reason}. Starting all hosts again" in hosts.console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("ends", "most"),
    [
        ({"algo-1": [(137, LOST)], "algo-2": [(138, RESULT)]}, 0),
        ({"algo-1": [(1, RESULT)], "algo-2": [(1, RESULT)]}, 3),  # the script failed, and `train` gave up
        ({"algo-1": [(137, RESULT)], "algo-2": [(137, RESULT)]}, 3),
        ({"algo-1": [(2, RESULT)], "algo-2": [(2, LOST)]}, 3),
        ({"algo-1": [(143, LOST)], "algo-2": [(143, LOST)]}, 3),
        ({"algo-2": [(0, LOST)], "algo-1": [(0, LOST)]}, 3),  # a program that is not ours
    ],
    ids=str,
)
def test_nothing_starts_again(ends: dict[str, list[End]], most: int) -> None:
    hosts = FakeHosts(ends, most)
    assert wait(hosts)[0] == {host: each[0][0] for host, each in ends.items()}
    assert hosts.created == []


def test_restarts_have_a_limit() -> None:
    """Those that `train` has made in the lost containers count too."""
    lost: End = (137, LOST)
    hosts = FakeHosts({"algo-1": [lost, lost, lost]}, 2)
    assert wait(hosts)[0] == {"algo-1": 137}
    assert [variables["SHOAL_RESTART"] for _, variables in hosts.created] == ["1", "2"]
    hosts = FakeHosts({"algo-1": [lost, lost]}, 2)
    hosts.listed = [{"number": 1}, {"number": 2}]
    assert wait(hosts)[0] == {"algo-1": 137}
    assert hosts.created == []


def test_restart_because_a_host_came_back_does_not_count_against_the_limit() -> None:
    hosts = FakeHosts({"algo-1": [(137, LOST), (0, RESULT)]}, 2)
    hosts.listed = [{"number": 1, "counted": True}, {"number": 2, "counted": False}]
    assert wait(hosts)[0] == {"algo-1": 0}
    ((_, variables),) = hosts.created
    assert (variables["SHOAL_RESTART"], variables["SHOAL_MAX_RESTARTS"]) == ("3", "3")


def test_end_of_an_earlier_container_is_ignored() -> None:
    hosts = FakeHosts({"algo-1": [(0, RESULT)]})
    hosts.arrivals = queue.SimpleQueue()
    hosts.arrivals.put(("algo-1", "removed", DockerError("no such container")))
    hosts._end("algo-1")
    assert wait(hosts)[0] == {"algo-1": 0}


def test_a_host_is_replaced_as_often_as_max_restarts_allows() -> None:
    hosts = FakeHosts({"algo-1": [(1, STOPPED)], "algo-2": [(137, LOST), (137, LOST)]}, 1)
    assert wait(hosts)[0] == {"algo-1": 1, "algo-2": 137}
    assert [host for host, _ in hosts.created] == ["algo-2"]


def test_hosts_that_start_again_have_no_deadline() -> None:
    """The one of the lost first host would stop them in the middle of their work."""
    hosts = FakeHosts({"algo-1": [(137, LOST), (0, STOPPED)], "algo-2": [(143, STOPPED), (0, STOPPED)]}, 1)
    hosts.later = [{"algo-1": (0, RESULT), "algo-2": (0, RESULT)}]
    assert wait(hosts)[0] == {"algo-1": 0, "algo-2": 0}
    assert [host for host, _ in hosts.created] == ["algo-1", "algo-2"]
    assert hosts.stopped == ["algo-2"], "before the new start, and not after it"


def test_all_hosts_are_stopped_if_the_connection_to_docker_is_lost(capsys: pytest.CaptureFixture[str]) -> None:
    hosts = FakeHosts({"algo-1": [(143, STOPPED)], "algo-2": [(143, STOPPED)]})
    hosts.arrivals.put(("algo-2", hosts.ids["algo-2"], DockerError("gone")))
    with pytest.raises(
        DockerError, match=r"^The connection to Docker was lost while algo-2 ran: gone\. Fix: start Docker"
    ):
        wait(hosts)
    assert hosts.stopped == ["algo-1", "algo-2"]
    assert "stopping; the script has" in capsys.readouterr().err


@pytest.mark.parametrize("end", [(2, RESULT), (143, RESULT), (0, RESULT)], ids=str)
def test_elastic_job_goes_on_without_a_host_that_cannot_be_replaced(end: End) -> None:
    """It is not stopped, and its exit code is that of the first host."""
    hosts = FakeHosts({"algo-1": [(0, STOPPED)], "algo-2": [end], "algo-3": [(0, STOPPED)]}, 3, min_hosts=2)
    hosts.later = [{"algo-1": (0, RESULT)}]
    watched = run.Watch(hosts)
    assert set(watched.wait()) == set(hosts.ids)
    assert (hosts.stopped, hosts.created) == (["algo-3"], [])
    assert watched.exit_codes() == {"algo-1": 0}


def test_elastic_job_replaces_lost_hosts_and_fails_with_the_code_of_a_host() -> None:
    ends: dict[str, list[End]] = {
        "algo-1": [(1, STOPPED)],
        "algo-2": [(137, LOST), (1, RESULT)],
        "algo-3": [(1, STOPPED)],
    }
    hosts = FakeHosts(ends, 3, min_hosts=1)
    hosts.end("algo-1", (1, RESULT))
    watched = run.Watch(hosts)
    watched.wait()
    assert hosts.created == [("algo-2", {})]
    assert watched.exit_codes() == {"algo-1": 1, "algo-2": 1, "algo-3": 1}
