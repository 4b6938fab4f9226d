"""Containers that are made and removed: an interrupt waits for the engine's answer, and is not lost."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from shoal.docker_client import containers


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_waits(number: signal.Signals) -> None:
    heard: list[int] = []
    before = signal.signal(number, lambda number, _: heard.append(number))
    try:
        with containers.delay_interrupts():
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)
            assert heard == []
        assert heard == [number]
        os.kill(os.getpid(), number)
        assert heard == [number] * 2
    finally:
        signal.signal(number, before)


def test_an_interrupt_ends_what_comes_after_the_answer() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt):
        with containers.delay_interrupts():
            os.kill(os.getpid(), signal.SIGINT)
            done.append("answered")
        done.append("went on")
    assert done == ["answered"]


def test_an_engine_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(containers, "HANGS", -1)
    done = []
    with pytest.raises(KeyboardInterrupt), containers.delay_interrupts():
        os.kill(os.getpid(), signal.SIGINT)
        done.append("answered")
    assert done == []
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_other_threads_hear_none() -> None:
    done = []

    def work() -> None:
        with containers.delay_interrupts():
            done.append(1)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [1]
