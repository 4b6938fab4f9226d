"""Runs the collectives of a process group one after the other, in the order of their calls."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import SimpleQueue
from typing import NamedTuple, Protocol

import torch
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]
from torch.distributed import Work

from smdistributed.core import timeline
from smdistributed.core.diagnostics import CollectiveError
from smdistributed.core.exceptions import SMDDPError

_Tensors = Sequence[torch.Tensor]
_Collective = Callable[[], object]
_Future = torch.futures.Future
_CLOSE_SECONDS = 5.0  # a collective that waits for lost ranks must not keep the process alive


class QueueOwner(Protocol):
    """A process group; a queue runs its collectives."""

    def recorded(self, name: str, collective: _Collective, result: _Tensors) -> _Collective:
        """Returns the collective so that it records itself in the timeline."""

    def explained(self, error: CollectiveError, result: _Tensors) -> SMDDPError:
        """Returns the error that the caller of a failed collective gets."""


class _QueuedCall(NamedTuple):
    owner: QueueOwner
    collective: _Collective
    result: list[torch.Tensor]
    future: _Future[list[torch.Tensor]]


class CollectiveQueue:
    """Runs collectives in a thread of its own; in the caller's if it needs no handle and none is queued.

    A callback of a collective runs its collectives at once, in the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: SimpleQueue[_QueuedCall | None] = SimpleQueue()
        self._closed = False
        self._unfinished = 0  # collectives that were called and have not ended
        self._lock = threading.Lock()
        self._running = threading.Lock()
        self._thread: threading.Thread | None = None
        self._done = completed([])  # of all synchronous collectives: their results are not used
        self._held_by_cpp: set[_Handle] = set()

    def run(
        self, owner: QueueOwner, name: str, collective: _Collective, result: _Tensors, is_async: bool | None
    ) -> Work:
        """Runs a collective in its turn, and returns a handle that ends with `result` or with its error.

        A caller that needs a handle never blocks, however short the collective: other ranks may call theirs only after
        something that this rank does next. If `is_async` is None, the caller needs one, and may be torch's C++. Raises
        SMDDPError if the group was shut down, or a synchronous collective fails.
        """
        if timeline.recorder is not None:
            collective = owner.recorded(name, collective, result)
        with self._lock:
            if self._closed:
                raise SMDDPError("The process group was shut down. Fix: create another one.")
            in_callback = self.is_this_thread()  # a collective's callback must not wait for its own turn
            inline = in_callback or (is_async is False and self._unfinished == 0)
            self._unfinished += 1
            if not inline:
                future: _Future[list[torch.Tensor]] = _Future()
                # Before the thread wakes up: two threads that both need the interpreter would take turns.
                handle = _Handle(name, future, self._held_by_cpp if is_async is None else None)
                self._start_thread()
                self._tasks.put(_QueuedCall(owner, collective, list(result), future))
        if not inline:
            return handle
        try:
            with self._running:
                collective()
        except CollectiveError as error:
            raise owner.explained(error, result) from None
        finally:
            with self._lock:
                self._unfinished -= 1
        return self._done if is_async is False else completed(list(result))

    def close(self) -> bool:
        """Ends the thread after queued collectives, and releases handles. False: a running one does not end."""
        with self._lock:
            self._closed = True
        if self._thread is not None:
            self._tasks.put(None)
            if not self.is_this_thread():  # otherwise a task held the last reference to the group
                self._thread.join(_CLOSE_SECONDS)
                if self._thread.is_alive():
                    return False
            self._thread = None
        self._held_by_cpp.clear()  # no caller waits for the collectives of a group that has ended
        return self._running.acquire(timeout=_CLOSE_SECONDS)

    def is_this_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def is_last(self) -> bool:
        """Whether no collective was called after the one that runs."""
        return self._unfinished <= 1

    def _start_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run_tasks, name=self._name, daemon=True)
            self._thread.start()

    def _run_tasks(self) -> None:
        """Thread: runs queued collectives until `close`; their futures get the result or the error."""
        while (task := self._tasks.get()) is not None:
            owner, collective, result, future = task
            error: BaseException | None = None
            try:
                with self._running:
                    collective()
            except CollectiveError as raised:
                error = owner.explained(raised, result)
            except BaseException as raised:  # for the caller that waits for the handle
                error = raised
            with self._lock:
                self._unfinished -= 1
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)  # type: ignore[arg-type]
            del task, owner, collective, result, future, error  # they hold tensors and the group, also while idle


class _Handle(Work):
    """The handle of a queued collective. torch's own handle of a future raises nothing in `wait`, up to torch 2.13.

    torch's C++ holds only the C++ part of this object. In old versions, and from a kernel (`per_device`), that does not
    keep the Python part alive; the base class's `wait` would then never end. So a handle that C++ may hold is kept from
    outside (`kept`) until C++ has waited or fetched the future: the garbage collector frees cycles. C++ does not tell
    when it drops a handle unused: such a handle is kept, with its tensors, as long as its group.
    """

    def __init__(self, name: str, future: _Future[list[torch.Tensor]], kept: set[_Handle] | None) -> None:
        super().__init__()
        self._name, self._future = name, future
        self._for_cpp = future.then(lambda done: done.value())  # C++ sees only errors that a callback has raised
        self._kept = kept
        if kept is not None:
            kept.add(self)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Blocks until the collective ends, and raises its error, or SMDDPError for a timeout. Frees this handle."""
        self._release()
        if timeout:
            raise SMDDPError("wait() takes no timeout here. Fix: set the group's, init_process_group(timeout=…).")
        with timeline.span("wait", self._name):
            self._future.wait()
        return True

    def get_future(self) -> _Future[list[torch.Tensor]]:
        """Returns a future that ends with the result, or with the collective's error. Lets this handle be freed."""
        self._release()
        return self._for_cpp

    def _release(self) -> None:
        """Lets this handle be freed: C++ has waited for it, or fetched its future."""
        if self._kept is not None:
            self._kept.discard(self)

    def is_completed(self) -> bool:
        return self._future.done()

    def is_success(self) -> bool:
        return self._future.done() and self.exception() is None

    def exception(self) -> BaseException | None:
        try:
            if self._future.done():
                self._future.value()
        except BaseException as error:
            return error
        return None

    def result(self) -> list[torch.Tensor]:
        return self._future.value()


def completed(result: list[torch.Tensor]) -> Work:
    future: _Future[list[torch.Tensor]] = _Future()
    future.set_result(result)
    work: Work = _create_work_from_future(future)
    return work
