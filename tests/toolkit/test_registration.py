"""The exchange of addresses before a job: how many connections the first host keeps open, and how long."""

from __future__ import annotations

import socket
from collections.abc import Callable

import pytest

from shoal_toolkit.discovery.host_list import HostList, Registration
from shoal_toolkit.hosts import registration, wire
from shoal_toolkit.hosts.messages import Register
from shoal_toolkit.hosts.wire import Channel
from shoal_toolkit.job.settings import TrainSettings, take_settings
from shoal_toolkit.system.loop import Loop


def choose_settings() -> TrainSettings:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    settings, problem = take_settings({"SHOAL_JOB_SECRET": "s3cret", "SHOAL_AGENT_PORT": str(port)})
    assert problem is None
    return settings


def list_hosts(count: int, rank: int) -> HostList:
    main = Registration("127.0.0.1" if rank else "", "7")
    return HostList("x", tuple(f"node-{number}" for number in range(count)), rank, "", registration=main)


def run_until(loop: Loop, done: Callable[[], bool]) -> None:
    """Run the loop, at most 20 s."""
    late: list[bool] = []
    timer = loop.call_later(20, lambda: late.append(True))
    loop.run_until(lambda: done() or bool(late))
    timer.cancel()
    assert not late


def test_all_children_may_connect_before_one_has_proved_the_secret(loop: Loop) -> None:
    settings = choose_settings()
    desk = registration._Desk(loop, list_hosts(40, 0), settings)
    visitors = [socket.create_connection(("127.0.0.1", settings.port)) for _ in range(39)]
    run_until(loop, lambda: len(desk._unproved) == 39)
    for visitor in visitors:
        visitor.close()
    desk.close()


class Silent(registration._Visitor):
    """A child that proves the secret, and does not register."""

    lost = False

    def _on_found(self, host: str, channel: Channel) -> None:
        self._channel = channel
        channel.on_lost = self._note

    def _note(self, reason: str) -> None:
        self.lost = True


def test_a_child_that_does_not_register_is_disconnected_and_one_that_does_stays(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "HANDSHAKE_SECONDS", 0.5)
    settings = choose_settings()
    desk = registration._Desk(loop, list_hosts(3, 0), settings)
    child = registration._Visitor(loop, list_hosts(3, 1), settings)
    run_until(loop, lambda: 1 in desk._registered)
    silent = Silent(loop, list_hosts(3, 2), settings)
    run_until(loop, lambda: silent.lost)  # later than the child's own limit
    assert list(desk._registered) == [1], child.problem
    for side in (child, silent, desk):
        side.close()


class Greedy(registration._Visitor):
    """A child that registers its own rank, and then the next one."""

    def _on_found(self, host: str, channel: Channel) -> None:
        super()._on_found(host, channel)
        channel.send(Register(self._rank + 1))


def test_a_child_registers_one_rank_only(loop: Loop) -> None:
    settings = choose_settings()
    desk = registration._Desk(loop, list_hosts(3, 0), settings)
    child = Greedy(loop, list_hosts(3, 1), settings)
    run_until(loop, lambda: bool(child.problem or desk.addresses))
    assert (desk.addresses, desk._registered) == ((), {})
    for side in (child, desk):
        side.close()
