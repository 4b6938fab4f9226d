"""The recorder: what is in its file, after a kill too, from several threads and processes; and what it costs."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from smdistributed import dataparallel
from smdistributed.core import timeline
from smdistributed.dataparallel.exceptions import SMDDPError

NAME = "smdataparallel_timeline.json"
ARGS = {"operation": "all_reduce", "bytes": 1024, "dtype": "float32", "engine": "shm", "bucket": 3}


@pytest.fixture(autouse=True)
def no_recording(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A job of one, as no launcher started it, whose recordings all end with the test."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    yield
    if timeline.recorder is not None:
        timeline.stop()
    timeline.set_clock_offset(0)


def launched(rank: int, size: int) -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}


def script(source: str, **environment: str) -> subprocess.Popen[str]:
    """Start a process that has `timeline` and `dataparallel`."""
    source = f"from smdistributed.core import timeline\nfrom smdistributed import dataparallel\n{source}"
    env = {**os.environ, **environment}
    return subprocess.Popen([sys.executable, "-c", source], env=env, stdout=subprocess.PIPE, text=True)


def events(file: Path, phase: str = "X") -> list[dict[str, Any]]:
    return [event for event in json.loads(file.read_text()) if event["ph"] == phase]


def cut(file: Path) -> list[dict[str, Any]]:
    """Read a file without its end as a viewer does: it puts the bracket there."""
    return [event for event in json.loads(file.read_text() + "]") if event["ph"] == "X"]


def test_a_span_has_its_times_in_microseconds_and_its_arguments(tmp_path: Path) -> None:
    before = time.time_ns() // 1000
    dataparallel.start_profiler(tmp_path)
    running = timeline.recorder
    assert running is not None
    began = timeline.now()
    running.complete("communication", "all_reduce", began, began + 2_500_000, ARGS)
    dataparallel.stop_profiler()
    (process,) = [event for event in events(tmp_path / NAME, "M") if event["name"] == "process_name"]
    (span,) = events(tmp_path / NAME)
    assert span["dur"] == 2500.0
    assert span["args"] == ARGS
    assert (span["cat"], span["name"], span["pid"]) == ("communication", "all_reduce", 0)
    start = process["args"]["start_time_since_epoch_in_micros"]
    assert before <= start + span["ts"] <= time.time_ns() // 1000


def test_an_instant_has_no_duration(tmp_path: Path) -> None:
    dataparallel.start_profiler(tmp_path)
    assert timeline.recorder is not None
    timeline.recorder.instant("communication", "bucket ready", {"bucket": 1})
    dataparallel.stop_profiler()
    (instant,) = events(tmp_path / NAME, "i")
    assert "dur" not in instant
    assert instant["args"] == {"bucket": 1}


def test_with_span_records_only_while_a_recording_runs(tmp_path: Path) -> None:
    with timeline.span("wait", "before"):
        pass
    dataparallel.start_profiler(tmp_path)
    with timeline.span("wait", "all_reduce"):
        time.sleep(0.01)
    dataparallel.stop_profiler()
    with timeline.span("wait", "after"):
        pass
    (span,) = events(tmp_path / NAME)
    assert span["name"] == "all_reduce"
    assert span["dur"] >= 10_000


def test_spans_at_the_same_time_have_rows_of_their_own(tmp_path: Path) -> None:
    dataparallel.start_profiler(tmp_path)
    running = timeline.recorder
    assert running is not None
    zero = timeline.now()
    for begin, end in ((0, 10), (5, 15), (10, 20)):
        running.complete("communication", "all_reduce", zero + begin, zero + end)
    dataparallel.stop_profiler()
    rows = [span["tid"] for span in events(tmp_path / NAME)]
    assert rows[0] == rows[2] != rows[1]
    names = {event["tid"]: event["args"]["name"] for event in events(tmp_path / NAME, "M") if "tid" in event}
    assert [names[row] for row in rows] == ["communication", "communication 2", "communication"]


def test_threads_lose_no_event_and_memory_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "_MAX_EVENTS", 100)
    dataparallel.start_profiler(tmp_path)
    running = timeline.recorder
    assert running is not None
    longest = [0]

    def record(thread: int) -> None:
        for number in range(2000):
            running.complete("communication", "all_reduce", number, number + 1, {"bucket": [thread, number]})
            longest[0] = max(longest[0], len(running._events))

    threads = [threading.Thread(target=record, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    dataparallel.stop_profiler()
    found = [tuple(span["args"]["bucket"]) for span in events(tmp_path / NAME)]
    assert sorted(found) == [(thread, number) for thread in range(4) for number in range(2000)]
    assert longest[0] < 1000


RECORD_ONE = "with timeline.span('communication', 'all_reduce'): pass\n"


@pytest.mark.parametrize(
    ("append_rank", "names"),
    [
        (False, {NAME: 0, "smdataparallel_timeline_1.json": 1, "smdataparallel_timeline_2.json": 2}),
        (True, {f"smdataparallel_timeline_{rank}.json": rank for rank in range(3)}),
    ],
)
def test_ranks_on_one_file_system_keep_their_files_apart(
    tmp_path: Path, append_rank: bool, names: dict[str, int]
) -> None:
    source = f"dataparallel.start_profiler({str(tmp_path)!r}, {append_rank})\n{RECORD_ONE}dataparallel.stop_profiler()"
    for process in [script(source, **launched(rank, 3)) for rank in range(3)]:
        process.communicate()
        assert process.returncode == 0
    assert {path.name: events(path)[0]["pid"] for path in tmp_path.iterdir()} == names


def test_a_path_that_ends_in_json_is_the_file(tmp_path: Path) -> None:
    dataparallel.start_profiler(str(tmp_path / "new" / "mine.json"))
    dataparallel.stop_profiler()
    dataparallel.start_profiler(tmp_path / "mine.json", append_rank=True)
    dataparallel.stop_profiler()
    assert [path.relative_to(tmp_path).as_posix() for path in sorted(tmp_path.rglob("*.json"))] == [
        "mine_0.json",
        "new/mine.json",
    ]


def test_a_killed_process_leaves_a_file_that_loads(tmp_path: Path) -> None:
    source = f"""
import os, time
timeline._WRITE_SECONDS = 0.05
dataparallel.start_profiler({str(tmp_path)!r})
for _ in range(5):
    {RECORD_ONE}
while not os.path.exists({str(tmp_path / NAME)!r}) or open({str(tmp_path / NAME)!r}).read().count('"X"') < 5:
    time.sleep(0.01)
print("recorded", flush=True)
time.sleep(60)
"""
    process = script(source)
    assert process.stdout is not None
    assert process.stdout.readline() == "recorded\n"
    process.send_signal(signal.SIGKILL)
    process.communicate()
    with pytest.raises(ValueError, match="Expecting"):
        json.loads((tmp_path / NAME).read_text())
    assert len(cut(tmp_path / NAME)) == 5


def test_a_process_that_ends_without_stop_completes_its_file(tmp_path: Path) -> None:
    process = script(f"dataparallel.start_profiler({str(tmp_path)!r})\n{RECORD_ONE}raise SystemExit(7)")
    process.communicate()
    assert process.returncode == 7
    assert len(events(tmp_path / NAME)) == 1


def test_a_forked_process_records_nothing(tmp_path: Path) -> None:
    source = f"""
import os, sys
dataparallel.start_profiler({str(tmp_path)!r})
{RECORD_ONE}
if os.fork() == 0:
    {RECORD_ONE}
    sys.exit(0 if timeline.recorder is None else 1)
assert os.wait()[1] == 0
"""
    process = script(source)
    process.communicate()
    assert process.returncode == 0
    assert len(events(tmp_path / NAME)) == 1


def test_a_second_recording_replaces_the_file(tmp_path: Path) -> None:
    for name in ("first", "second"):
        dataparallel.start_profiler(tmp_path)
        with timeline.span("wait", name):
            pass
        dataparallel.stop_profiler()
    assert [span["name"] for span in events(tmp_path / NAME)] == ["second"]


def test_the_clock_offset_moves_the_begin_and_later_holds(tmp_path: Path) -> None:
    timeline.set_clock_offset(-250)
    dataparallel.start_profiler(tmp_path)
    timeline.set_clock_offset(1000)
    dataparallel.stop_profiler()
    about = [event["args"] for event in events(tmp_path / NAME, "M") if event["name"] == "process_name"]
    starts = [arguments["start_time_since_epoch_in_micros"] for arguments in about]
    assert [start - starts[0] for start in starts] == [0, -250, 1000]
    assert about[-1]["clock_offset_in_micros"] == 1000


def test_starting_twice_names_the_file_that_runs(tmp_path: Path) -> None:
    dataparallel.start_profiler(tmp_path)
    with pytest.raises(SMDDPError, match=rf"recorded to {tmp_path / NAME}\. Fix: stop it"):
        dataparallel.start_profiler(tmp_path / "other")
    dataparallel.stop_profiler()
    assert not (tmp_path / "other").exists()


def test_stopping_without_a_start_is_an_error() -> None:
    with pytest.raises(SMDDPError, match=r"No timeline is being recorded\. Fix: start one first"):
        dataparallel.stop_profiler()


def test_an_unwritable_path_is_named_with_a_fix(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SMDDPError, match=r"rank 0 cannot be written to .* \(.*/file: File exists\)\. Fix: give a dir"):
        dataparallel.start_profiler(tmp_path / "file")
    assert timeline.recorder is None


def test_a_full_disk_ends_the_recording_and_not_the_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        running = timeline.Recorder(Path("/dev/full"), 0, 1, "")
        for _ in range(2):
            running.complete("wait", "all_reduce", 0, 1)
            running.flush()
        running.close()
    (message,) = caplog.messages
    assert "/dev/full ends here; training continues: No space left on device" in message


def test_what_json_does_not_know_is_written_as_text(tmp_path: Path) -> None:
    dataparallel.start_profiler(tmp_path)
    with timeline.span("wait", "all_reduce", {"dtype": Path("float32")}):
        pass
    dataparallel.stop_profiler()
    assert events(tmp_path / NAME)[0]["args"] == {"dtype": "float32"}


def per_call(call: Any, calls: int = 20_000) -> float:
    """Return the least CPU seconds of a call in five rounds: what the machine does besides only adds."""

    def round_() -> float:
        began = time.process_time()
        for _ in range(calls):
            call()
        return time.process_time() - began

    return min(round_() for _ in range(5)) / calls


def test_an_event_costs_less_than_its_json_and_nothing_when_off(tmp_path: Path) -> None:
    def instrumented() -> None:
        running = timeline.recorder
        if running is not None:
            running.complete("communication", "all_reduce", 1000, 2000, ARGS)

    event = {"ph": "X", "cat": "communication", "name": "all_reduce", "ts": 1.0, "dur": 1.0, "args": ARGS}
    as_json = per_call(lambda: json.dumps(event), 2000)
    off = per_call(instrumented)
    running = timeline.Recorder(tmp_path / "cost.json", 0, 1, "")
    running.flush = running._events.clear  # type: ignore[method-assign]  # the cost of recording, not of writing
    timeline.recorder = running
    on = per_call(instrumented)
    timeline.recorder = None
    running.close()
    assert off < as_json / 20
    assert on < as_json / 2
