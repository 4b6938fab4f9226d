"""What a rank does when: computation, communication and waiting, recorded into a Chrome trace.

Off by default. `start` begins a recording and `stop` ends it; Perfetto (ui.perfetto.dev), chrome://tracing and
`shoal report timeline` open the file. Instrumented code asks first, so that it costs next to nothing without one:

    running = timeline.recorder
    if running is not None:
        running.complete("communication", "all_reduce", began, timeline.now(), {"bytes": 1024, ...})

The events, each with a category (`cat`), which is also its row in the trace:

| category        | name                                  | what it is
|-----------------|---------------------------------------|-------------------------------------------------------
| "step"          | "step"                                | span: one training step, where the library knows of it
| "compute"       | "forward", "backward", "optimizer"    | span: the main thread computes; waits may lie inside
| "wait"          | what for, such as "all_reduce"        | span: the main thread is blocked until that is done
| "communication" | the operation, such as "all_reduce"   | span: from when this rank begins a collective to its end
| "communication" | "bucket ready"                        | instant: a bucket has its last gradient and may travel

The arguments of a communication span: `operation`, `bytes` (what this rank hands in), `dtype`, `engine` ("shm",
"gloo", "nccl", "mpi"), `bucket` (its index; left out where there is none), `group` (where it is not of all ranks).
"bucket ready" has `bucket` and `bytes`. Ranks of a group begin the collectives of one operation and bucket in the same
order: so readers find the n-th of one rank among those of the others.

The file is in the JSON array format, one event a line, `pid` the rank, `ts` and `dur` in microseconds. It is written
once a second, and is read without its closing bracket too: a job that is killed loses its last second. The first event
is the metadata event `process_name`, whose `start_time_since_epoch_in_micros` is when `ts` 0 was: by the clock of rank
0, where `set_clock_offset` was told how this host's differs. Where the event is there twice, the later one holds.
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
_MOST_EVENTS = 1 << 16  # in memory, about 20 MB: who records faster than they are written writes them itself
_MOST_LANES = 1000

_log = logging.getLogger(__name__)
_Args = Optional[Mapping[str, Any]]
_Event = tuple[str, str, int, int, _Args]  # category, name, began and ended in ns; an instant has ended at -1

now = time.monotonic_ns
"""The clock of `Recorder.complete`, in nanoseconds."""

wall = time.time_ns
"""The host's clock, in nanoseconds since 1970: what `set_clock_offset` is about."""


class TimelineError(RuntimeError):
    """A recording cannot begin or end; the message says why, where and what to do."""


class Recorder:
    """Writes the events of one rank into one file. Every method may be called from any thread.

    `job` is the same on all ranks of a job, and other than that of most jobs: readers tell mixed files by it.
    """

    def __init__(self, file: Path, rank: int, world_size: int, job: str) -> None:
        """Create the file, or replace it. Raises OSError when it cannot be written."""
        self.file = file
        self._rank = rank
        begun, monotonic = wall(), now()
        self._started = begun // 1000
        self._zero = monotonic - begun % 1000  # ts 0 lies at a whole microsecond of the epoch
        self._about = {"name": f"rank {rank}", "rank": rank, "world_size": world_size, "job": job}
        self._about["host"] = socket.gethostname()
        self._events: deque[_Event] = deque()
        self._lanes: dict[str, list[int]] = {category: [] for category in CATEGORIES}
        self._lock = threading.RLock()  # a signal handler may record or stop while this thread writes
        self._output: Any = file.open("wb", buffering=0)  # unbuffered: a forked child must not write it once more
        self._write(f"[\n{json.dumps(self._process())}")
        self._stopping = threading.Event()
        self._writer = threading.Thread(target=self._write_now_and_then, name="smdistributed-timeline", daemon=True)
        self._writer.start()

    def complete(self, category: str, name: str, began: int, ended: int, args: _Args = None) -> None:
        """Record a span of time, `began` to `ended` by `now()`. `args` must not change afterwards."""
        self._events.append((category, name, began, ended, args))
        if len(self._events) >= _MOST_EVENTS:
            self.flush()

    def instant(self, category: str, name: str, args: _Args = None) -> None:
        """Record that something happens now."""
        self.complete(category, name, now(), -1, args)

    def set_clock_offset(self, micros: int) -> None:
        """Say how far rank 0's clock is ahead of this host's, in microseconds (negative: behind)."""
        self._write(f",\n{json.dumps(self._process(micros))}")

    def flush(self) -> None:
        """Write what has been recorded until now."""
        with self._lock:
            events = [self._events.popleft() for _ in range(len(self._events))]
            self._write("".join(f",\n{json.dumps(event, default=str)}" for event in self._chrome(events)))

    def close(self) -> None:
        """Write the rest and end the file; what is recorded later is dropped."""
        self._stopping.set()
        if self._writer is not threading.current_thread():
            self._writer.join()
        with self._lock:
            self.flush()
            self._write("\n]\n")
            if self._output is not None:
                self._output.close()
                self._output = None

    def _write_now_and_then(self) -> None:
        while not self._stopping.wait(_WRITE_SECONDS):
            self.flush()

    def _write(self, text: str) -> None:
        """Write, or say that it cannot be done and record no more: a full disk must not end the training."""
        with self._lock:
            rest = memoryview(text.encode())
            try:
                while rest and self._output is not None:
                    rest = rest[self._output.write(rest) :]
            except OSError as error:
                self._output.close()
                self._output = None
                _log.error("The timeline %s ends here, and training goes on: %s.", self.file, error.strerror)

    def _process(self, offset: int = 0) -> dict[str, Any]:
        """The event that says whose file it is, and when it began by rank 0's clock."""
        begin = {"start_time_since_epoch_in_micros": self._started + offset, "clock_offset_in_micros": offset}
        return {"ph": "M", "name": "process_name", "pid": self._rank, "args": {**self._about, **begin}}

    def _chrome(self, events: Iterable[_Event]) -> Iterator[dict[str, Any]]:
        for category, name, began, ended, args in events:
            instant = ended < 0
            event: dict[str, Any] = {"ph": "i" if instant else "X", "cat": category, "name": name, "pid": self._rank}
            lane, is_new = (0, False) if instant else self._lane(category, began, ended)
            event["tid"] = CATEGORIES.index(category) * _MOST_LANES + lane
            if is_new:
                yield self._row(event["tid"], f"{category} {lane + 1}" if lane else category)
            event["ts"] = (began - self._zero) / 1000
            event.update({"s": "t"} if instant else {"dur": (ended - began) / 1000})
            if args:
                event["args"] = args
            yield event

    def _row(self, tid: int, name: str) -> dict[str, Any]:
        return {"ph": "M", "name": "thread_name", "pid": self._rank, "tid": tid, "args": {"name": name}}

    def _lane(self, category: str, began: int, ended: int) -> tuple[int, bool]:
        """Spans at the same time need rows of their own: return the first free one, and whether it is new."""
        ends = self._lanes[category]
        lane = next((lane for lane, end in enumerate(ends) if end <= began), len(ends))
        if lane == len(ends):
            ends.append(ended)
            return lane, True
        ends[lane] = ended
        return lane, False


recorder: Recorder | None = None
"""The recording that runs, if one does."""

_clock_offset = 0
_change = threading.RLock()
_waiting: WeakKeyDictionary[Any, Callable[[Any], None]] = WeakKeyDictionary()


def start(
    path: str | os.PathLike[str],
    rank: int,
    world_size: int,
    *,
    default_name: str = "timeline.json",
    append_rank: bool = False,
    job: str = "",
) -> Path:
    """Begin a recording, and return its file. A file that is there is replaced; directories are made.

    path: a file if it ends in `.json`, else a directory, for a file `default_name`.
    append_rank: put the rank into the file's name (`timeline_3.json`). Ranks other than 0 do so in any case: ranks
        that share a file system would else destroy each other's file.
    job: see Recorder.

    Raises TimelineError when a recording runs already and when the file cannot be written.
    """
    global recorder
    file = _file(Path(path), default_name, rank if append_rank or rank else None)
    with _change:
        if recorder is not None:
            raise TimelineError(f"A timeline is being recorded to {recorder.file}: stop it before starting another.")
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            begun = Recorder(file, rank, world_size, job)
        except OSError as error:
            raise TimelineError(
                f"The timeline of rank {rank} cannot be written to {file} ({error.filename}: {error.strerror}). "
                "Give a directory this process may write to, or a file name that ends in .json."
            ) from error
        if _clock_offset:
            begun.set_clock_offset(_clock_offset)
        recorder = begun
        for owner, begin in list(_waiting.items()):
            begin(owner)
        _waiting.clear()
    return file


def when_started(owner: Any, begin: Callable[[Any], None]) -> None:
    """Call `begin(owner)` once: now, if a recording runs, else when the next one starts, if the owner lives then."""
    with _change:
        if recorder is None:
            _waiting[owner] = begin
        else:
            begin(owner)


def stop() -> Path:
    """End the recording, and return its file. Raises TimelineError when none runs."""
    global recorder
    with _change:
        if recorder is None:
            raise TimelineError("No timeline is being recorded: start one first.")
        ended, recorder = recorder, None
    ended.close()
    return ended.file


def set_clock_offset(micros: int) -> None:
    """Say how far rank 0's clock is ahead of this host's, in microseconds: for this recording and later ones."""
    global _clock_offset
    with _change:
        _clock_offset = micros
        if recorder is not None:
            recorder.set_clock_offset(micros)


def span(category: str, name: str, args: _Args = None) -> AbstractContextManager[None]:
    """Record what runs inside `with`, if a recording runs."""
    running = recorder
    return _NOTHING if running is None else _Span(running, category, name, args)


_NOTHING = nullcontext()


class _Span(AbstractContextManager):  # type: ignore[type-arg]
    __slots__ = ("_began", "_event", "_recorder")

    def __init__(self, running: Recorder, category: str, name: str, args: _Args) -> None:
        self._recorder, self._event = running, (category, name, args)

    def __enter__(self) -> None:
        self._began = now()

    def __exit__(self, *_: object) -> None:
        category, name, args = self._event
        self._recorder.complete(category, name, self._began, now(), args)


def _file(path: Path, default_name: str, rank: int | None) -> Path:
    file = path if path.suffix == ".json" else path / default_name
    return file if rank is None else file.with_name(f"{file.stem}_{rank}{file.suffix}")


def _end_at_exit() -> None:
    if recorder is not None:
        stop()


def _forget_in_child() -> None:
    """A forked process (a loader of data) is no rank, and its parent writes the file."""
    global recorder
    recorder = None


atexit.register(_end_at_exit)
os.register_at_fork(after_in_child=_forget_in_child)
