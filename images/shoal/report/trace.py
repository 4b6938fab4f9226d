"""Reads, checks and merges the Chrome traces of a job's ranks.

Ranks write them with `smdistributed.dataparallel.start_profiler`; `smdistributed.core.timeline` defines their content.
A trace of several ranks, such as one of `format_merged_trace`, can be read too.
"""

from __future__ import annotations

import contextlib
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.clean_text import cut_line
from shoal.errors import TraceError, UsageError, did_you_mean
from shoal.limits import MOST_RANKS, MOST_TRACE, read_file

PATTERN = "smdataparallel_timeline*.json"
"""The files that ranks write if their path is a directory."""

_EXPECTED = "expected a Chrome trace. Fix: name a file that smdistributed.dataparallel.start_profiler wrote"
_BEGIN = "start_time_since_epoch_in_micros"
_MOST = 2**63
"""The largest number of nanoseconds or bytes."""
_MOST_LETTERS = 1_000  # of a text
_KEYS = ("bucket", "group", "operation", "dtype", "engine")
"""The arguments of a span that are shown or compared."""


@dataclass(frozen=True)
class Span:
    """An activity of one rank, from `begin` to `end` in nanoseconds since the timeline began."""

    category: str
    name: str
    begin: int
    end: int
    args: Mapping[str, Any] = field(default_factory=dict)

    @property
    def duration(self) -> int:
        """In nanoseconds; 0 for an instant."""
        return self.end - self.begin

    @property
    def bytes(self) -> int:
        """The bytes that the rank passed in; 0 if not recorded."""
        value = self.args.get("bytes", 0)
        return value if isinstance(value, int) and 0 <= value <= _MOST else 0


@dataclass(frozen=True)
class Rank:
    """The recording of one rank. Spans and instants are sorted by begin."""

    number: int
    file: Path
    host: str
    world_size: int | None
    job: str
    clock_offset: int | None
    """What was added to the times of the host's clock, in microseconds; None: not recorded."""
    complete: bool
    """False: the file is cut off, because the process was killed or is still running."""
    spans: tuple[Span, ...]
    instants: tuple[Span, ...]

    def spans_of(self, category: str) -> tuple[Span, ...]:
        """Returns the spans of a category."""
        return tuple(span for span in self.spans if span.category == category)


@dataclass(frozen=True)
class Timeline:
    """The ranks of a job, on one clock."""

    began: int
    """Time 0 of all spans, in nanoseconds since 1970."""
    ranks: tuple[Rank, ...]

    @property
    def end(self) -> int:
        """When the last event ends, in nanoseconds since the timeline began."""
        return max(event.end for rank in self.ranks for event in (*rank.spans, *rank.instants))

    @property
    def missing(self) -> tuple[int, ...]:
        """The ranks of the job that have no file.

        The job is as large as the largest world size in the files. Without any, none is missing.
        """
        there = {rank.number for rank in self.ranks}
        size = max((rank.world_size or 0 for rank in self.ranks), default=0)
        return tuple(number for number in range(size) if number not in there)


def find_files(paths: Sequence[Path]) -> tuple[Path, ...]:
    """Returns the files of `paths`, each once.

    A directory stands for all timelines in and below it, otherwise its JSON files.

    Raises `UsageError` if a path does not exist, or a directory has neither.
    """
    files = [file for path in paths for file in (_list_directory(path) if path.is_dir() else [path])]
    for file in files:
        if not file.exists():
            names = [path.name for path in file.parent.glob("*.json")] if file.parent.is_dir() else []
            raise UsageError(f"{file}: no such file or directory.{did_you_mean(file.name, names)} Fix: name a timeline")
    return tuple(dict.fromkeys(files))


def read_timeline(files: Sequence[Path]) -> Timeline:
    """Reads the files of a job's ranks, and puts them on one clock.

    Raises:
        TraceError: If a file is not a trace or has no spans, or files are from different jobs.
    """
    tracks = [track for file in files for track in _read_tracks(file)]
    began = min(track.began for track in tracks)
    ranks = tuple(sorted((_make_rank(track, began) for track in tracks), key=lambda rank: rank.number))
    _check_one_job(ranks)
    return Timeline(began, ranks)


def format_merged_trace(timeline: Timeline) -> str:
    """Returns one Chrome trace of all ranks, in the JSON array format, one event per line."""
    events = (json.dumps(event) for rank in timeline.ranks for event in _chrome_events(timeline, rank))
    return "[\n" + ",\n".join(events) + "\n]\n"


@dataclass(frozen=True)
class _Track:
    """The events of one process in a file. `began` is the time of `ts` 0, in nanoseconds since 1970."""

    pid: int
    file: Path
    complete: bool
    about: Mapping[str, Any]
    events: Sequence[Mapping[str, Any]]

    @property
    def began(self) -> int:
        """In nanoseconds since 1970; 0 if it was not recorded."""
        return int(self.about.get(_BEGIN) or 0) * 1000


def _list_directory(directory: Path) -> list[Path]:
    files = sorted(directory.rglob(PATTERN)) or sorted(directory.glob("*.json"))
    if not files:
        raise UsageError(f"{directory}: contains no {PATTERN}; {_EXPECTED}")
    return files


def _read_tracks(file: Path) -> Iterator[_Track]:
    events, complete = _read_events(file)
    of_pid: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    about: dict[int, dict[str, Any]] = defaultdict(dict)
    for event in events:
        pid = event.get("pid", 0)
        if event.get("ph") == "M" and event.get("name") == "process_name":
            about[pid].update(event["args"])
        elif event.get("ph") in ("X", "i", "I"):
            of_pid[pid].append(event)
    if not any(event["ph"] == "X" for events in of_pid.values() for event in events):
        raise TraceError(
            f"{file}: contains no spans (events of phase X). Training may have stopped before the first step."
            " Fix: leave out the file"
        )
    for pid, recorded in of_pid.items():
        if type(pid) is not int or pid not in range(MOST_RANKS):
            raise TraceError(
                f"{file}: an event has pid {cut_line(repr(pid), 80)}; expected the rank, an integer below {MOST_RANKS}."
                " Fix: leave out the file"
            )
        _check_numbers(file, about[pid])
        yield _Track(pid, file, complete, about[pid], recorded)


def _check_numbers(file: Path, about: Mapping[str, Any]) -> None:
    for key, most in ((_BEGIN, _MOST // 1000), ("world_size", MOST_RANKS)):
        value = about.get(key)
        if value is not None and (type(value) is not int or not 0 <= value <= most):
            raise TraceError(
                f"{file}: {key} is {cut_line(repr(value), 80)}; expected an integer up to {most}."
                " Fix: leave out the file"
            )


def _read_events(file: Path) -> tuple[list[dict[str, Any]], bool]:
    """Returns the complete events of a file, which may be cut off, and whether it is complete."""
    try:
        text = read_file(file, MOST_TRACE, follow=True).decode()
    except OSError as error:
        raise TraceError(f"{file}: cannot be read: {error.strerror}. Fix: name a readable file") from error
    except UnicodeDecodeError as error:
        raise TraceError(f"{file}: not text; {_EXPECTED}") from error
    except ValueError as error:
        raise TraceError(f"{file}: {error}; {_EXPECTED}") from error
    try:
        document, complete = json.loads(text), True
    except RecursionError:
        raise TraceError(f"{file}: nested too deeply; {_EXPECTED}") from None
    except ValueError as error:
        document, complete = _parse_complete_events(text), False
        if not document:
            raise TraceError(f"{file}: not JSON ({error}); {_EXPECTED}") from error
    events = document.get("traceEvents") if isinstance(document, dict) else document
    if not isinstance(events, list) or not all(map(_is_event, events)):
        raise TraceError(f"{file}: neither a list of events nor an object with traceEvents; {_EXPECTED}")
    return [{"args": {}, **event} for event in events], complete


def _is_event(event: object) -> bool:
    if not isinstance(event, dict) or isinstance(event.get("pid"), (list, dict)):  # such a pid cannot be compared
        return False
    return isinstance(event.get("args", {}), dict)


def _parse_complete_events(text: str) -> list[Any]:
    """Reads a trace that is cut off: one event per line, as our ranks write it. Empty if it has another form."""
    for complete in (text, text.rpartition("\n")[0]):
        with contextlib.suppress(ValueError, RecursionError):
            return list(json.loads(complete.rstrip().rstrip(",") + "]"))
    return []


def _make_rank(track: _Track, began: int) -> Rank:
    shift = track.began - began
    try:
        events = sorted((_make_span(event, shift) for event in track.events), key=lambda event: event[1].begin)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise TraceError(
            f"{track.file}: ts or dur of an event is not a number of microseconds ({error}); {_EXPECTED}"
        ) from error
    about = track.about
    return Rank(
        number=track.pid,
        file=track.file,
        host=str(about.get("host", "")),
        world_size=about.get("world_size"),
        job=str(about.get("job", "")),
        clock_offset=about.get("clock_offset_in_micros"),
        complete=track.complete,
        spans=tuple(span for phase, span in events if phase == "X"),
        instants=tuple(span for phase, span in events if phase != "X"),
    )


def _make_span(event: Mapping[str, Any], shift: int) -> tuple[str, Span]:
    """Returns the phase of an event, and its span, `shift` nanoseconds later."""
    begin = round(event["ts"] * 1000) + shift
    end = begin + (round(event["dur"] * 1000) if event["ph"] == "X" else 0)
    if not -_MOST <= begin <= end <= _MOST:
        raise ValueError("out of range")
    category, name = (_cut(event.get(key, "")) for key in ("cat", "name"))
    args = {key: _cut(value) if key in _KEYS and value is not None else value for key, value in event["args"].items()}
    return event["ph"], Span(str(category), str(name), begin, end, args)


def _cut(value: Any) -> int | str:
    return value if type(value) is int and abs(value) <= _MOST else cut_line(str(value), _MOST_LETTERS)


def _check_one_job(ranks: Sequence[Rank]) -> None:
    """The ranks must be sorted by number."""
    for one, other in zip(ranks, ranks[1:], strict=False):
        if one.number == other.number:
            raise TraceError(_describe_conflict(one, other, f"both are rank {one.number}"))
    first = ranks[0]
    for other in ranks[1:]:
        if (first.world_size, first.job) != (other.world_size, other.job):
            raise TraceError(_describe_conflict(first, other, f"{_describe_job(first)}, and {_describe_job(other)}"))
    begun_last = max(ranks, key=lambda rank: _time_range(rank)[0])
    ended_first = min(ranks, key=lambda rank: _time_range(rank)[1])
    if _time_range(ended_first)[1] < _time_range(begun_last)[0]:
        raise TraceError(
            _describe_conflict(
                ended_first,
                begun_last,
                "one ended before the other began, or the clocks of their hosts differ by that much",
            )
        )


def _describe_conflict(one: Rank, other: Rank, why: str) -> str:
    return f"{one.file} and {other.file} are from different jobs: {why}. Fix: name the files of one job, one per rank"


def _describe_job(rank: Rank) -> str:
    return f"{rank.world_size} ranks, job {rank.job or 'unnamed'}"


def _time_range(rank: Rank) -> tuple[int, int]:
    events: Iterable[Span] = (*rank.spans, *rank.instants)
    return min(event.begin for event in events), max(event.end for event in events)


def _chrome_events(timeline: Timeline, rank: Rank) -> Iterator[dict[str, Any]]:
    about = {
        "name": f"rank {rank.number}",
        "rank": rank.number,
        "world_size": rank.world_size,
        "job": rank.job,
        "host": rank.host,
        _BEGIN: timeline.began // 1000,
        "clock_offset_in_micros": rank.clock_offset,
    }
    yield {"ph": "M", "name": "process_name", "pid": rank.number, "args": about}
    rows: dict[str, int] = {}
    for span in rank.spans:
        if span.category not in rows:
            rows[span.category] = len(rows)
            args = {"name": span.category}
            yield {"ph": "M", "name": "thread_name", "pid": rank.number, "tid": rows[span.category], "args": args}
        yield {"ph": "X", "dur": span.duration / 1000, **_chrome_event(rank, span, rows)}
    for instant in rank.instants:
        yield {"ph": "i", "s": "t", **_chrome_event(rank, instant, rows)}


def _chrome_event(rank: Rank, span: Span, rows: Mapping[str, int]) -> dict[str, Any]:
    place = {"pid": rank.number, "tid": rows.get(span.category, 0)}
    return {"cat": span.category, "name": span.name, **place, "ts": span.begin / 1000, "args": dict(span.args)}
