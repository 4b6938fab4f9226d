"""Chrome traces of the ranks of a job: read, checked and merged.

The ranks write them with `smdistributed.dataparallel.start_profiler`, and `smdistributed.core.timeline` says what is in
them. A trace of several ranks, such as the one that `merged` makes, is read as well.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.errors import TraceError, UsageError, did_you_mean

PATTERN = "smdataparallel_timeline*.json"
"""The files that the ranks write where they are given a directory."""

_EXPECTED = "expected a Chrome trace, such as smdistributed.dataparallel.start_profiler writes"
_BEGIN = "start_time_since_epoch_in_micros"


@dataclass(frozen=True)
class Span:
    """What one rank does from `begin` to `end`, in nanoseconds since the timeline begins."""

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
        """What the rank handed in; 0 where it is not recorded."""
        value = self.args.get("bytes", 0)
        return value if isinstance(value, int) else 0


@dataclass(frozen=True)
class Rank:
    """What one rank recorded. Spans and instants are in ascending order of their begin."""

    number: int
    file: Path
    host: str
    world_size: int | None
    job: str
    clock_offset: int | None
    """What was added to the host's clock, in microseconds; None: the file does not say."""
    complete: bool
    """False: the file has no end, as its process was killed or still runs."""
    spans: tuple[Span, ...]
    instants: tuple[Span, ...]

    def of(self, category: str) -> tuple[Span, ...]:
        """Return the spans of a category."""
        return tuple(span for span in self.spans if span.category == category)


@dataclass(frozen=True)
class Timeline:
    """The ranks of a job on one clock."""

    began: int
    """Time 0 of all spans, in nanoseconds since 1970."""
    ranks: tuple[Rank, ...]

    @property
    def end(self) -> int:
        """When the last event ends, in nanoseconds since the timeline begins."""
        return max(event.end for rank in self.ranks for event in (*rank.spans, *rank.instants))

    @property
    def missing(self) -> tuple[int, ...]:
        """The ranks of the job whose files are not there."""
        there = {rank.number for rank in self.ranks}
        size = max((rank.world_size or 0 for rank in self.ranks), default=0)
        return tuple(number for number in range(size) if number not in there)


def find(paths: Sequence[Path]) -> tuple[Path, ...]:
    """Return the files that `paths` mean: directories stand for the timelines in and below them."""
    files = [file for path in paths for file in (_in_directory(path) if path.is_dir() else [path])]
    for file in files:
        if not file.exists():
            names = [path.name for path in file.parent.glob("*.json")] if file.parent.is_dir() else []
            raise UsageError(f"{file}: no such file or directory.{did_you_mean(file.name, names)}")
    return tuple(dict.fromkeys(files))


def read(files: Sequence[Path]) -> Timeline:
    """Read the ranks' files and put them on one clock.

    Raises `TraceError`, naming the file, for what is not a trace or has no spans, and for files of different jobs.
    """
    tracks = [track for file in files for track in _tracks(file)]
    began = min(track.began for track in tracks)
    ranks = tuple(sorted((_rank(track, began) for track in tracks), key=lambda rank: rank.number))
    _refuse_two_jobs(ranks)
    return Timeline(began, ranks)


def merged(timeline: Timeline) -> str:
    """Return one Chrome trace with all ranks, in the JSON array format, one event a line."""
    events = (json.dumps(event) for rank in timeline.ranks for event in _chrome(timeline, rank))
    return "[\n" + ",\n".join(events) + "\n]\n"


@dataclass(frozen=True)
class _Track:
    """The events of one process in a file; `began` is when `ts` 0 was, in nanoseconds since 1970."""

    pid: int
    file: Path
    complete: bool
    about: Mapping[str, Any]
    events: Sequence[Mapping[str, Any]]

    @property
    def began(self) -> int:
        return int(self.about.get(_BEGIN, 0)) * 1000


def _in_directory(directory: Path) -> list[Path]:
    files = sorted(directory.rglob(PATTERN)) or sorted(directory.glob("*.json"))
    if not files:
        raise UsageError(f"{directory}: no {PATTERN} in it or below it. {_EXPECTED.capitalize()}.")
    return files


def _tracks(file: Path) -> Iterator[_Track]:
    events, complete = _events(file)
    of_pid: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    about: dict[int, dict[str, Any]] = defaultdict(dict)
    for event in events:
        pid = event.get("pid", 0)
        if event.get("ph") == "M" and event.get("name") == "process_name":
            about[pid].update(event["args"])
        elif event.get("ph") in ("X", "i", "I"):
            of_pid[pid].append(event)
    if not any(event["ph"] == "X" for events in of_pid.values() for event in events):
        raise TraceError(f"{file}: no spans of time in it (events of phase X). Was the training stopped at once?")
    for pid, recorded in of_pid.items():
        if not isinstance(pid, int):
            raise TraceError(f"{file}: an event has pid {pid!r}: it must be the rank, an integer.")
        if not isinstance(about[pid].get(_BEGIN, 0), int):
            raise TraceError(f"{file}: {_BEGIN} is {about[pid][_BEGIN]!r}: it must be an integer.")
        yield _Track(pid, file, complete, about[pid], recorded)


def _events(file: Path) -> tuple[list[dict[str, Any]], bool]:
    """Return the events of a file, and whether it has its end."""
    try:
        text = file.read_text()
    except OSError as error:
        raise TraceError(f"{file}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise TraceError(f"{file}: not text; {_EXPECTED}.") from error
    try:
        document, complete = json.loads(text), True
    except ValueError as error:
        document, complete = _before_the_break(text), False
        if not document:
            raise TraceError(f"{file}: not JSON ({error}); {_EXPECTED}.") from error
    events = document.get("traceEvents") if isinstance(document, dict) else document
    if not isinstance(events, list) or not all(map(_is_event, events)):
        raise TraceError(f"{file}: JSON, but neither a list of events nor an object with traceEvents; {_EXPECTED}.")
    return [{"args": {}, **event} for event in events], complete


def _is_event(event: object) -> bool:
    return isinstance(event, dict) and isinstance(event.get("args", {}), dict)


def _before_the_break(text: str) -> list[Any]:
    """Return the whole events of an array that ends in the middle: the format allows it, as jobs get killed."""
    events: list[Any] = []
    decoder, position = json.JSONDecoder(), _skip(text, 0, "[")
    while position < len(text):
        try:
            event, position = decoder.raw_decode(text, position)
        except ValueError:
            break
        events.append(event)
        position = _skip(text, position, ",")
    return events if text.lstrip().startswith("[") else []


def _skip(text: str, position: int, mark: str) -> int:
    while position < len(text) and (text[position].isspace() or text[position] == mark):
        position += 1
    return position


def _rank(track: _Track, began: int) -> Rank:
    shift = track.began - began
    try:
        events = sorted((_span(event, shift) for event in track.events), key=lambda event: event[1].begin)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise TraceError(
            f"{track.file}: an event lacks a number of microseconds as ts or dur ({error}); {_EXPECTED}."
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


def _span(event: Mapping[str, Any], shift: int) -> tuple[str, Span]:
    begin = round(event["ts"] * 1000) + shift
    end = begin + (round(event["dur"] * 1000) if event["ph"] == "X" else 0)
    return event["ph"], Span(event.get("cat", ""), event.get("name", ""), begin, end, event["args"])


def _refuse_two_jobs(ranks: Sequence[Rank]) -> None:
    for one, other in zip(ranks, ranks[1:], strict=False):
        if one.number == other.number:
            raise TraceError(_mixed(one, other, f"both are of rank {one.number}"))
    first = ranks[0]
    for other in ranks[1:]:
        if (first.world_size, first.job) != (other.world_size, other.job):
            raise TraceError(_mixed(first, other, f"{_job(first)} here, {_job(other)} there"))
    begun_last = max(ranks, key=lambda rank: _range(rank)[0])
    ended_first = min(ranks, key=lambda rank: _range(rank)[1])
    if _range(ended_first)[1] < _range(begun_last)[0]:
        raise TraceError(
            _mixed(
                ended_first,
                begun_last,
                "the first ended before the second began, or their hosts' clocks differ by that much",
            )
        )


def _mixed(one: Rank, other: Rank, why: str) -> str:
    return f"{one.file} and {other.file} are not of one job: {why}. Name the files of one job, one for each rank."


def _job(rank: Rank) -> str:
    return f"{rank.world_size} ranks, job {rank.job or 'unnamed'}"


def _range(rank: Rank) -> tuple[int, int]:
    events: Iterable[Span] = (*rank.spans, *rank.instants)
    return min(event.begin for event in events), max(event.end for event in events)


def _chrome(timeline: Timeline, rank: Rank) -> Iterator[dict[str, Any]]:
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
        yield {"ph": "X", "dur": span.duration / 1000, **_event(rank, span, rows)}
    for instant in rank.instants:
        yield {"ph": "i", "s": "t", **_event(rank, instant, rows)}


def _event(rank: Rank, span: Span, rows: Mapping[str, int]) -> dict[str, Any]:
    place = {"pid": rank.number, "tid": rows.get(span.category, 0)}
    return {"cat": span.category, "name": span.name, **place, "ts": span.begin / 1000, "args": dict(span.args)}
