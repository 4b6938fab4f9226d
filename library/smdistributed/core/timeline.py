"""Records a rank's computation, communication and waiting as a Chrome trace.

Off by default. `start` begins a recording and `stop` ends it; Perfetto (ui.perfetto.dev), chrome://tracing and
`shoal timeline` open the file. Instrumented code checks first, so that it costs almost nothing without one:

    running = timeline.recorder
    if running is not None:
        running.complete("communication", "all_reduce", began, timeline.now(), {"bytes": 1024, ...})

The events, each with a category (`cat`), which is also its row in the trace:

| category        | name                                  | meaning
|-----------------|---------------------------------------|-------------------------------------------------------
| "step"          | "step 1", "step 2", …                 | span: one training step, if the library knows it
| "compute"       | "forward", "backward", "optimizer", … | span: the main thread computes; it may contain waits
| "wait"          | the operation, such as "all_reduce"   | span: the main thread is blocked by it
| "communication" | the operation, such as "all_reduce"   | span: from this rank's call of a collective to its end
| "communication" | "bucket ready"                        | instant: a bucket has its last gradient and may be sent

A communication span has the arguments `operation`, `bytes` (this rank's input), `dtype` and `engine` ("shm", "gloo",
"nccl", "mpi"). `bucket` is its index, if any. `group` is missing if it has all ranks. "bucket ready" has `bucket` and
`bytes`. Ranks of a group begin the collectives of one operation and bucket in the same order, so readers can match the
n-th of each rank.

The file has the JSON array format, one event per line. `pid` is the rank; `ts` and `dur` are in microseconds. It is
written once per second, and readers accept it without its closing bracket, so a job that is killed loses one second.
The first event is the metadata event `process_name`; its `start_time_since_epoch_in_micros` is the time of `ts` 0, by
rank 0's clock if `set_clock_offset` was called. If there are two such events, the later one is valid.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Optional
from weakref import WeakKeyDictionary

CATEGORIES = ("step", "compute", "wait", "communication")
"""In the order of their rows."""

_WRITE_SECONDS = 1.0
_MAX_EVENTS = 1 << 16  # in memory, about 20 MB: if there are more, the recording thread writes them
_MAX_LANES = 1000

_log = logging.getLogger(__name__)
_Args = Optional[Mapping[str, Any]]
_Event = tuple[str, str, int, int, _Args]  # category, name, began and ended in ns; an instant has ended at -1

now = time.monotonic_ns
"""The clock of `Recorder.complete`, in nanoseconds."""

wall = time.time_ns
"""The host's clock, in nanoseconds since 1970, which `set_clock_offset` corrects."""


class TimelineError(RuntimeError):
    """A recording cannot begin or end; the message has the reason, the file and the fix."""


class Recorder:
    """Writes the events of one rank into one file, once per second in a thread. Any thread may call every method.

    `job` is the same on all ranks of a job and different for most jobs, so that readers detect mixed files. An existing
    file is replaced. Raises OSError if it cannot be written.
    """

    def __init__(self, file: Path, rank: int, world_size: int, job: str) -> None:
        self.file = file
        self._rank = rank
        begun, monotonic = wall(), now()
        self._started = begun // 1000
        self._zero = monotonic - begun % 1000  # ts 0 is a whole microsecond of the epoch
        self._about = {"name": f"rank {rank}", "rank": rank, "world_size": world_size, "job": job}
        self._about["host"] = socket.gethostname()
        self._events: deque[_Event] = deque()
        self._lanes: dict[str, list[int]] = {category: [] for category in CATEGORIES}
        self._lock = threading.RLock()  # a signal handler may record or stop while this thread writes
        self._output: Any = file.open("wb", buffering=0)  # unbuffered: a forked child must not write it again
        self._write(f"[\n{json.dumps(self._metadata_event())}")
        self._stopping = threading.Event()
        self._writer = threading.Thread(target=self._flush_periodically, name="smdistributed-timeline", daemon=True)
        self._writer.start()

    def complete(self, category: str, name: str, began: int, ended: int, args: _Args = None) -> None:
        """Records a span of time: nanoseconds by `now()`; an end of -1 is an instant. `args` must not change later.

        `name`: see the table at the top of this module. If very many events have gathered, it writes them now.
        """
        self._events.append((category, name, began, ended, args))
        if len(self._events) >= _MAX_EVENTS:
            self.flush()

    def instant(self, category: str, name: str, args: _Args = None) -> None:
        self.complete(category, name, now(), -1, args)

    def set_clock_offset(self, micros: int) -> None:
        """Records by how many microseconds rank 0's clock is ahead of this host's (negative: behind)."""
        self._write(f",\n{json.dumps(self._metadata_event(micros))}")

    def flush(self) -> None:
        """Writes the events recorded until now to the file. An error is logged, and ends the recording."""
        with self._lock:
            events = [self._events.popleft() for _ in range(len(self._events))]
            self._write("".join(f",\n{json.dumps(event, default=str)}" for event in self._chrome_events(events)))

    def close(self) -> None:
        """Writes the remaining events, closes the file and ends the thread; later events are dropped."""
        self._stopping.set()
        if self._writer is not threading.current_thread():
            self._writer.join()
        with self._lock:
            self.flush()
            self._write("\n]\n")
            if self._output is not None:
                self._output.close()
                self._output = None

    def _flush_periodically(self) -> None:
        """Thread: writes events every `_WRITE_SECONDS` until the recording is closed."""
        while not self._stopping.wait(_WRITE_SECONDS):
            self.flush()

    def _write(self, text: str) -> None:
        """Writes text. If it fails, logs that and ends the recording: a full disk must not end the training."""
        with self._lock:
            rest = memoryview(text.encode())
            try:
                while rest and self._output is not None:
                    rest = rest[self._output.write(rest) :]
            except OSError as error:
                self._output.close()
                self._output = None
                _log.error("The timeline %s ends here; training continues: %s.", self.file, error.strerror)

    def _metadata_event(self, offset: int = 0) -> dict[str, Any]:
        begin = {"start_time_since_epoch_in_micros": self._started + offset, "clock_offset_in_micros": offset}
        return {"ph": "M", "name": "process_name", "pid": self._rank, "args": {**self._about, **begin}}

    def _chrome_events(self, events: Iterable[_Event]) -> Iterator[dict[str, Any]]:
        """Yields events as the trace has them, times in microseconds from the recording's beginning.

        The event that names a row comes before its first span. Overlapping spans of a category get rows of their own.
        """
        for category, name, began, ended, args in events:
            instant = ended < 0
            event: dict[str, Any] = {"ph": "i" if instant else "X", "cat": category, "name": name, "pid": self._rank}
            lane, is_new = (0, False) if instant else self._assign_lane(category, began, ended)
            event["tid"] = CATEGORIES.index(category) * _MAX_LANES + lane
            if is_new:
                yield self._row_event(event["tid"], f"{category} {lane + 1}" if lane else category)
            event["ts"] = (began - self._zero) / 1000
            event.update({"s": "t"} if instant else {"dur": (ended - began) / 1000})
            if args:
                event["args"] = args
            yield event

    def _row_event(self, tid: int, name: str) -> dict[str, Any]:
        return {"ph": "M", "name": "thread_name", "pid": self._rank, "tid": tid, "args": {"name": name}}

    def _assign_lane(self, category: str, began: int, ended: int) -> tuple[int, bool]:
        """Takes the first free row for a span until `ended`, and returns it and whether it is new."""
        ends = self._lanes[category]
        lane = next((lane for lane, end in enumerate(ends) if end <= began), len(ends))
        if lane == len(ends):
            ends.append(ended)
            return lane, True
        ends[lane] = ended
        return lane, False


recorder: Recorder | None = None
"""The running recording, if any."""

_clock_offset = 0
_change = threading.RLock()
_waiting: WeakKeyDictionary[Any, Callable[[Any], None]] = WeakKeyDictionary()
_observers: list[Callable[[Recorder], Callable[[], None]]] = []
_ends: list[Callable[[], None]] = []


def start(
    path: str | os.PathLike[str],
    rank: int,
    world_size: int,
    *,
    default_name: str = "timeline.json",
    append_rank: bool = False,
    job: str = "",
) -> Path:
    """Begins a recording; replaces an existing file and creates directories. Calls what `observe` was given.

    `path` is a file if it ends in `.json`, otherwise a directory for a file `default_name`. `append_rank` puts rank 0
    too into the file's name. Other ranks always do: they would overwrite each other's file. Raises TimelineError if a
    recording runs already, or the file cannot be written.
    """
    global recorder
    file = _trace_file(Path(path), default_name, rank if append_rank or rank else None)
    with _change:
        if recorder is not None:
            raise TimelineError(
                f"A timeline is being recorded to {recorder.file}. Fix: stop it before starting another."
            )
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            begun = Recorder(file, rank, world_size, job)
        except OSError as error:
            raise TimelineError(
                f"The timeline of rank {rank} cannot be written to {file} ({error.filename}: {error.strerror}). "
                "Fix: give a directory that this process may write to, or a file name that ends in .json."
            ) from error
        if _clock_offset:
            begun.set_clock_offset(_clock_offset)
        recorder = begun
        _ends.extend(observer(begun) for observer in _observers)
        for owner, begin in list(_waiting.items()):
            begin(owner)
        _waiting.clear()
    return file


def when_started(owner: Any, begin: Callable[[Any], None]) -> None:
    """Calls `begin(owner)` once: now if a recording runs, else when the next one starts, if the owner still exists."""
    with _change:
        if recorder is None:
            _waiting[owner] = begin
        else:
            begin(owner)


def observe(begin: Callable[[Recorder], Callable[[], None]]) -> None:
    """Calls `begin` for each recording when it starts, and for one that runs. `stop` calls the function it returns."""
    with _change:
        _observers.append(begin)
        if recorder is not None:
            _ends.append(begin(recorder))


def start_if_requested(variable: str, rank: int, world_size: int, *, default_name: str, job: str = "") -> None:
    """Begins a recording (see `start`) if an environment variable says where and none runs.

    Raises TimelineError if the file cannot be written.
    """
    path = os.environ.get(variable)
    if path and recorder is None:
        start(path, rank, world_size, default_name=default_name, job=job)


def stop() -> Path:
    """Ends the recording and returns its file. Raises TimelineError if none runs."""
    global recorder
    with _change:
        if recorder is None:
            raise TimelineError("No timeline is being recorded. Fix: start one first.")
        while _ends:
            _ends.pop()()
        ended, recorder = recorder, None
    ended.close()
    return ended.file


def set_clock_offset(micros: int) -> None:
    """Sets by how many microseconds rank 0's clock is ahead of this host's, for this recording and later ones."""
    global _clock_offset
    with _change:
        _clock_offset = micros
        if recorder is not None:
            recorder.set_clock_offset(micros)


def span(category: str, name: str, args: _Args = None) -> AbstractContextManager[None]:
    """Returns a context manager that records its block as a span, if a recording runs."""
    running = recorder
    return _NOTHING if running is None else _RecordedSpan(running, category, name, args)


_NOTHING = nullcontext()


class _RecordedSpan(AbstractContextManager):  # type: ignore[type-arg]
    __slots__ = ("_began", "_event", "_recorder")

    def __init__(self, running: Recorder, category: str, name: str, args: _Args) -> None:
        self._recorder, self._event = running, (category, name, args)

    def __enter__(self) -> None:
        self._began = now()

    def __exit__(self, *_: object) -> None:
        category, name, args = self._event
        self._recorder.complete(category, name, self._began, now(), args)


def _trace_file(path: Path, default_name: str, rank: int | None) -> Path:
    file = path if path.suffix == ".json" else path / default_name
    return file if rank is None else file.with_name(f"{file.stem}_{rank}{file.suffix}")


def _end_at_exit() -> None:
    if recorder is not None:
        stop()


def _stop_in_child() -> None:
    """Ends recording in a forked process (a data loader): only its parent is a rank and writes the file."""
    global recorder
    recorder = None


atexit.register(_end_at_exit)
os.register_at_fork(after_in_child=_stop_in_child)
