"""Hosts that still run after another has ended are stopped after a while."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.jobs import docker_job


def test_host_that_outlives_the_others_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped: list[str] = []
    told = threading.Event()

    def report_end(host: str, _: str, arrivals: queue.SimpleQueue[tuple[str, docker_job._HostExit]]) -> None:
        # algo-2 ends when it is stopped; if nobody does, it ends by itself, so that this test fails and does not hang.
        code = 0 if host == "algo-1" else 143 if told.wait(30) else 99
        arrivals.put((host, docker_job._HostExit(code, out_of_memory=False)))

    def stop(containers: Iterable[Any]) -> None:
        stopped.extend(container.id for container in containers)
        told.set()

    monkeypatch.setattr(docker_job, "_report_exit", report_end)
    monkeypatch.setattr(docker_job, "_stop", stop)
    monkeypatch.setattr(docker_job, "STRAGGLER_SECONDS", 0)
    hosts: Any = {name: SimpleNamespace(id=f"container of {name}") for name in ("algo-1", "algo-2")}
    ended = docker_job._wait(hosts)
    assert {host: end.exit_code for host, end in ended.items()} == {"algo-1": 0, "algo-2": 143}
    assert stopped == ["container of algo-2"]
