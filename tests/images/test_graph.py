"""Work that stands on other work: order, how many at once, failures and interrupts."""

from __future__ import annotations

import threading

import pytest

from shoal.builds import graph

BELOW = {"a": None, "b": None, "a1": "a", "a2": "a", "a11": "a1", "c": "elsewhere"}


def nothing() -> None:
    pass


@pytest.mark.parametrize("jobs", [1, 2, 9])
def test_parents_come_first(jobs: int) -> None:
    done: list[str] = []
    under_way: set[str] = set()
    most = 0
    met = threading.Event()

    def work(name: str) -> str:
        nonlocal most
        under_way.add(name)
        most = max(most, len(under_way))
        if most > 1:
            met.set()
        beneath = BELOW[name]
        assert beneath in (None, "elsewhere", *done)
        met.wait(30 if jobs > 1 else 0.01)  # for another at its side, which may come late
        under_way.discard(name)
        done.append(name)
        return name.upper()

    assert graph.run_tasks(BELOW, work, nothing, jobs) == {name: name.upper() for name in BELOW}
    assert most <= jobs
    assert most > 1 or jobs == 1


def test_a_failure_stops_only_images_that_extend_it() -> None:
    def work(name: str) -> str:
        if name == "a1":
            raise OSError("no")
        return name

    results = graph.run_tasks(BELOW, work, nothing, 2)
    assert list(results) == list(BELOW)
    assert isinstance(results["a1"], OSError)
    assert isinstance(results["a11"], graph.NotTriedError)
    assert str(results["a11"]) == "it extends a1, which was not built"
    assert [results[name] for name in ("a", "b", "a2", "c")] == ["a", "b", "a2", "c"]


def test_children_of_an_untried_image_are_not_tried() -> None:
    def work(name: str) -> str:
        raise OSError(name)

    results = graph.run_tasks({"a": None, "a1": "a", "a11": "a1"}, work, nothing, 2)
    assert [type(result) for result in results.values()] == [OSError, graph.NotTriedError, graph.NotTriedError]


def test_an_interrupt_stops_the_work_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = threading.Event()
    ended: list[str] = []

    def work(name: str) -> str:
        stopped.wait(60)
        ended.append(name)
        return name

    class Queue:
        """The interrupt comes while the first result is waited for."""

        def put(self, item: object) -> None:
            pass

        def get(self) -> object:
            raise KeyboardInterrupt

    monkeypatch.setattr(graph, "SimpleQueue", Queue)
    with pytest.raises(KeyboardInterrupt):
        graph.run_tasks({"a": None, "b": None, "c": None}, work, stopped.set, 2)
    assert sorted(ended) == ["a", "b"]


def test_an_interrupt_before_a_thread_runs_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: threading.Thread) -> None:
        raise KeyboardInterrupt

    stopped = threading.Event()
    monkeypatch.setattr(threading.Thread, "start", interrupt)
    with pytest.raises(KeyboardInterrupt):
        graph.run_tasks({"a": None}, str.upper, stopped.set, 1)
    assert stopped.is_set()


def test_no_more_tasks_run_at_once_than_allowed() -> None:
    """Also after one has ended, while another runs on."""
    running: set[str] = set()
    most: list[int] = []
    last_has_begun = threading.Event()

    def work(name: str) -> None:
        running.add(name)
        most.append(len(running))
        if name == "last":
            last_has_begun.set()
        elif name != "short":
            last_has_begun.wait(60 if name == "long" else 0.2)
        running.remove(name)

    graph.run_tasks(dict.fromkeys(("long", "short", "third", "last")), work, lambda: None, jobs=2)
    assert max(most) == 2
