"""A thread that runs collectives one after the other, in the order in which they were asked for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import SimpleQueue
from typing import Optional

import torch
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]
from torch.distributed import Work

from smdistributed.core.exceptions import SMDDPError

_Tensors = Sequence[torch.Tensor]
_Future = torch.futures.Future
_AT_MOST_SECONDS = 5.0  # a collective whose other ranks are gone must not keep the process
_Task = Optional[tuple[Callable[[], object], list[torch.Tensor], "_Future[list[torch.Tensor]]"]]


class Ordered:
    """Runs collectives in a thread of its own; at once in the caller's where nobody wants a handle or is before it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: SimpleQueue[_Task] = SimpleQueue()
        self._closed = False
        self._waiting = 0  # tasks that were asked for and have not ended
        self._lock = threading.Lock()
        self._running = threading.Lock()
        self._thread: threading.Thread | None = None
        self._done = completed([])  # of all that ran at once: its result is not used
        self._held_by_cpp: set[_Handle] = set()

    def run(self, collective: Callable[[], object], result: _Tensors, is_async: bool | None) -> Work:
        """Run a collective; the handle ends with `result`, or with what the collective raised.

        Where it runs at once it raises here. A caller that wants a handle is never blocked, however short the
        collective: the others may come to it only after something that this rank does next. None for `is_async`: the
        caller wants one, and is or may be torch's C++.
        """
        with self._lock:
            if self._closed:
                raise SMDDPError("The process group was shut down: make another one.")
            called_back = self.is_this_thread()  # what a collective's callback asks for cannot wait for its turn
            inline = called_back or (is_async is False and self._waiting == 0)
            self._waiting += 1
            if not inline:
                future: _Future[list[torch.Tensor]] = _Future()
                self._start()
                self._tasks.put((collective, list(result), future))
        if not inline:
            return _Handle(future, self._held_by_cpp if is_async is None else None)
        self._perform(collective)
        return self._done if is_async is False else completed(list(result))

    def close(self) -> bool:
        """End the thread after what it has been asked for, and let nothing begin; False: what runs does not end."""
        with self._lock:
            self._closed = True
        if self._thread is not None:
            self._tasks.put(None)
            if not self.is_this_thread():  # else a task was the last to hold the group
                self._thread.join(_AT_MOST_SECONDS)
                if self._thread.is_alive():
                    return False
            self._thread = None
        self._held_by_cpp.clear()  # nobody waits for the collectives of a group that is no more
        return self._running.acquire(timeout=_AT_MOST_SECONDS)

    def is_this_thread(self) -> bool:
        """Whether the caller is a collective that runs in the thread."""
        return threading.current_thread() is self._thread

    def is_last(self) -> bool:
        """Whether nothing has been asked for after what runs."""
        return self._waiting <= 1

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            self._thread.start()

    def _serve(self) -> None:
        while self._serve_one():
            pass

    def _serve_one(self) -> bool:
        """Run the next task; False: none will come. This frame lets go of it: a task holds tensors and its group."""
        task = self._tasks.get()
        if task is None:
            return False
        collective, result, future = task
        try:
            self._perform(collective)
        except BaseException as error:  # whoever waits for the handle gets it
            future.set_exception(error)  # type: ignore[arg-type]
        else:
            future.set_result(result)
        return True

    def _perform(self, collective: Callable[[], object]) -> None:
        try:
            with self._running:
                collective()
        finally:
            with self._lock:
                self._waiting -= 1


class _Handle(Work):
    """What a caller waits for. That which torch makes of a future raises nothing in `wait`, up to torch 2.13.

    torch's C++ holds the part of this object that is written in C++. In old versions, and from a kernel (`per_device`),
    that does not keep this one: left alone, it would have the methods of the base class, whose `wait` never ends. So
    what C++ may hold is kept until it has waited or has asked for the future, and is kept from outside: the garbage
    collector takes a circle. Nobody can tell when C++ has let go of a handle unasked: that one is kept, with its
    tensors, as long as its group.

    kept: where this is kept, if C++ may hold it.
    """

    def __init__(self, future: _Future[list[torch.Tensor]], kept: set[_Handle] | None) -> None:
        super().__init__()
        self._future = future
        self._told = future.then(lambda done: done.value())  # C++ knows only of errors that a callback has raised
        self._kept = kept
        if kept is not None:
            kept.add(self)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for the collective's end; raise what it raised."""
        self._let_go()
        if timeout:
            raise SMDDPError("A handle's wait takes no timeout here: the group has one, init_process_group(timeout=…).")
        self._future.wait()
        return True

    def get_future(self) -> _Future[list[torch.Tensor]]:
        self._let_go()
        return self._told

    def _let_go(self) -> None:
        if self._kept is not None:
            self._kept.discard(self)

    def is_completed(self) -> bool:
        return self._future.done()

    def is_success(self) -> bool:
        return self._future.done() and self.exception() is None

    def exception(self) -> BaseException | None:
        """What the collective raised, if it has ended."""
        try:
            if self._future.done():
                self._future.value()
        except BaseException as error:
            return error
        return None

    def result(self) -> list[torch.Tensor]:
        return self._future.value()


def completed(result: list[torch.Tensor]) -> Work:
    """Return the handle of a collective that has ended."""
    future: _Future[list[torch.Tensor]] = _Future()
    future.set_result(result)
    work: Work = _create_work_from_future(future)
    return work
