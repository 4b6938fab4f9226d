"""Names are looked up beside the loop."""

from __future__ import annotations

import threading
import time

import pytest

from shoal_toolkit.hosts import resolve
from shoal_toolkit.hosts.resolve import Address, Resolver
from shoal_toolkit.system.loop import Loop


@pytest.fixture
def loop() -> Loop:
    return Loop()


def test_many_names_are_looked_up(loop: Loop) -> None:
    found: list[list[Address] | OSError] = []
    resolver = Resolver(loop)
    for _ in range(600):
        resolver.look_up("localhost", 7411, found.append)
    loop.run_until(lambda: len(found) == 600)
    assert all(isinstance(addresses, list) and addresses[0][1][1] == 7411 for addresses in found)
    resolver.close()
    loop.close()


@pytest.mark.parametrize("name", ["no-such-host.invalid", "a" * 300, "a..b"])
def test_a_name_that_cannot_be_resolved_gives_an_error(loop: Loop, name: str) -> None:
    found: list[list[Address] | OSError] = []
    Resolver(loop).look_up(name, 1, found.append)
    loop.run_until(lambda: bool(found))
    assert isinstance(found[0], OSError)
    loop.close()


def test_a_slow_name_server_delays_nothing(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()

    def slow(host: str, port: int) -> list[Address]:
        release.wait(30)
        return []

    monkeypatch.setattr(resolve, "look_up_host", slow)
    found: list[list[Address] | OSError] = []
    ticks: list[float] = []
    Resolver(loop).look_up("slow", 1, found.append)
    loop.call_later(0.05, lambda: ticks.append(time.monotonic()))
    loop.run_until(lambda: bool(ticks))
    assert not found
    release.set()
    loop.run_until(lambda: bool(found))
    assert found == [[]]
    loop.close()
