"""`shoal timeline`: overlap and skew of small traces worked out by hand, merging, and invalid files."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import ShoalError, TraceError, UsageError
from shoal.formats import format_time
from shoal.report import timeline_page, timeline_text, trace
from shoal.report.timeline_analysis import (
    Analysis,
    Intervals,
    analyse,
    clip,
    difference,
    intersection,
    length,
    list_caveats,
    union,
)
from shoal.report.timeline_page import write_timeline_report

from .command import shoal_command

EPOCH = 1_700_000_000_000_000
COMMUNICATION, COMPUTE, WAIT, STEP = "communication", "compute", "wait", "step"
Event = dict[str, Any]


def span(category: str, begin: float, end: float, name: str = "", **args: Any) -> Event:
    """Return a span; times are in microseconds."""
    event = {"ph": "X", "cat": category, "name": name or category, "tid": 0, "ts": begin, "dur": end - begin}
    return {**event, "args": args}


def reduce(begin: float, end: float, bucket: int = 0, size: int = 0) -> Event:
    return span(COMMUNICATION, begin, end, "all_reduce", operation="all_reduce", bucket=bucket, bytes=size)


def ready(at: float, bucket: int) -> Event:
    return {"ph": "i", "cat": COMMUNICATION, "name": "bucket ready", "tid": 0, "ts": at, "args": {"bucket": bucket}}


def write(
    directory: Path, rank: int, events: Iterable[Event], *, start: int = EPOCH, end: str = "\n]\n", **about: Any
) -> Path:
    """Write the file of a rank; `start` is its time 0, in microseconds since 1970."""
    about = {"world_size": 1, "job": "algo-1:7592", "host": "algo-1", **about}
    process = {"ph": "M", "name": "process_name", "args": {**about, "start_time_since_epoch_in_micros": start}}
    lines = [json.dumps({**event, "pid": rank}) for event in (process, *events)]
    file = directory / f"smdataparallel_timeline_{rank}.json"
    file.write_text("[\n" + ",\n".join(lines) + end)
    return file


def analysis_of(*files: Path) -> Analysis:
    return analyse(trace.read_timeline(files))


# Half-open intervals, and the set of whole numbers in them.
pieces = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=12)


def points(intervals: Iterable[tuple[int, int]]) -> set[int]:
    return {point for begin, end in intervals for point in range(begin, end)}


def normal(intervals: Intervals) -> bool:
    """Whether the intervals are disjoint, not empty and in order."""
    return all(begin < end for begin, end in intervals) and list(intervals) == sorted(intervals)


@given(pieces, pieces)
def test_interval_arithmetic_is_that_of_sets_of_points(
    ones: list[tuple[int, int]], others: list[tuple[int, int]]
) -> None:
    one, other = union(ones), union(others)
    assert points(one) == points(ones)
    assert all(end < begin for (_, end), (begin, _) in zip(one, one[1:], strict=False))
    assert length(one) == len(points(ones))
    for result, expected in (
        (intersection(one, other), points(ones) & points(others)),
        (difference(one, other), points(ones) - points(others)),
    ):
        assert normal(result)
        assert points(result) == expected
        assert length(result) == len(expected)


@given(pieces, st.integers(0, 40), st.integers(0, 40))
def test_clipping_is_intersecting_with_one_interval(ones: list[tuple[int, int]], begin: int, end: int) -> None:
    assert clip(union(ones), begin, end) == intersection(union(ones), union([(begin, end)]))


def test_overlap_by_compute_spans(tmp_path: Path) -> None:
    """Backward 0–100, its end from 80 on a wait; reduces 30–60 and 50–110: 80 together, 80–110 exposed."""
    events = [
        span(COMPUTE, 0, 100, "backward"),
        span(WAIT, 80, 100),
        reduce(30, 60, 0, 4000),
        reduce(50, 110, 1, 4000),
        span(STEP, 0, 120),
    ]
    (of,) = analysis_of(write(tmp_path, 0, events)).ranks
    assert length(of.communication) == 80_000
    assert of.exposed == ((80_000, 110_000),)
    assert of.overlap == pytest.approx(1 - 30 / 80)
    assert of.bandwidth == pytest.approx(8000 / 80_000)
    assert (of.waiting, of.bytes, of.steps, of.step_time) == (20_000, 8000, 1, 120_000)
    assert of.shares is not None
    assert (of.shares.computing, of.shares.exposed, of.shares.idle) == pytest.approx((80 / 120, 30 / 120, 10 / 120))


def test_overlap_without_compute_spans_is_by_the_waits(tmp_path: Path) -> None:
    """The recording lasts 10–100, the main thread waits 40–60: of the reduces 10–50 and 90–100, 40–50 is exposed."""
    (of,) = analysis_of(write(tmp_path, 0, [reduce(10, 50), span(WAIT, 40, 60), reduce(90, 100)])).ranks
    assert of.exposed == ((40_000, 50_000),)
    assert of.overlap == pytest.approx(1 - 10 / 50)


def test_no_communication_has_no_overlap(tmp_path: Path) -> None:
    analysis = analysis_of(write(tmp_path, 0, [span(COMPUTE, 0, 10)]))
    assert analysis.ranks[0].overlap is None
    assert "No communication was recorded." in list(timeline_text.summarize_timeline(analysis))
    (column,) = [column for column in timeline_text.COLUMNS if column.name == "overlap"]
    assert column.text(analysis.ranks[0]) == "–"


def test_files_that_began_at_different_times_are_put_on_one_clock(tmp_path: Path) -> None:
    first = write(tmp_path, 0, [reduce(100, 200)], start=EPOCH, world_size=2)
    second = write(tmp_path, 1, [reduce(0.5, 50)], start=EPOCH + 150, world_size=2)
    timeline = trace.read_timeline([second, first])
    assert [rank.number for rank in timeline.ranks] == [0, 1]
    assert [(of.begin, of.end) for rank in timeline.ranks for of in rank.spans] == [
        (100_000, 200_000),
        (150_500, 200_000),
    ]
    assert timeline.began == EPOCH * 1000


def test_the_later_start_of_a_file_holds(tmp_path: Path) -> None:
    corrected = {"ph": "M", "name": "process_name", "args": {"start_time_since_epoch_in_micros": EPOCH + 7}}
    file = write(tmp_path, 0, [reduce(0, 1), corrected])
    assert trace.read_timeline([file]).began == (EPOCH + 7) * 1000


def test_the_merged_trace_reads_as_the_files_do(tmp_path: Path) -> None:
    files = [
        write(tmp_path, rank, [reduce(rank, 10), ready(2, 0), span(COMPUTE, 0, 8)], start=EPOCH + rank, world_size=2)
        for rank in range(2)
    ]
    timeline = trace.read_timeline(files)
    (tmp_path / "merged.json").write_text(trace.format_merged_trace(timeline))
    again = trace.read_timeline([tmp_path / "merged.json"])
    assert again.began == timeline.began
    assert [(rank.number, rank.host, rank.spans, rank.instants) for rank in again.ranks] == [
        (rank.number, rank.host, rank.spans, rank.instants) for rank in timeline.ranks
    ]


def four_ranks(directory: Path, late: int = 2, by: float = 5, **about: Any) -> list[Path]:
    """Write ten steps. Rank `late` begins each reduce `by` µs after the others. All ranks end together."""
    return [
        write(
            directory,
            rank,
            [
                event
                for step in range(0, 1000, 100)
                for event in (
                    span(STEP, step, step + 90),
                    span(COMPUTE, step, step + 60, "backward"),
                    ready(step + 20, 0),
                    reduce(step + 20 + (by if rank == late else 0), step + 50, 0, 1000),
                )
            ],
            world_size=4,
            **{"host": f"algo-{rank}", **about},
        )
        for rank in range(4)
    ]


def test_the_straggler_is_named(tmp_path: Path) -> None:
    analysis = analysis_of(*four_ranks(tmp_path))
    assert analysis.straggler == 2
    assert analysis.shares == {0: 0, 1: 0, 2: 1, 3: 0}
    assert [of.last_to for of in analysis.ranks][2] == 10
    assert [of.lateness for of in analysis.ranks] == [0, 0, 5000, 0]
    assert "Rank 2 is the straggler: it is last in 10 of 10 collectives" in " ".join(
        timeline_text.summarize_timeline(analysis)
    )


def test_ranks_that_are_late_in_turn_are_not_stragglers(tmp_path: Path) -> None:
    files = [
        write(
            tmp_path,
            rank,
            [reduce(at + (5 if at // 100 % 2 == rank else 0), at + 50) for at in range(0, 1000, 100)],
            world_size=2,
        )
        for rank in range(2)
    ]
    analysis = analysis_of(*files)
    assert analysis.skew == 50_000
    assert analysis.straggler is None


def test_collectives_are_matched_by_operation_bucket_and_turn(tmp_path: Path) -> None:
    """Rank 1 runs bucket 1 before bucket 0, and has not come to the last collective."""
    first = write(tmp_path, 0, [reduce(0, 10, 0), reduce(10, 20, 1), reduce(30, 40, 0)], world_size=2)
    second = write(tmp_path, 1, [reduce(1, 10, 1), reduce(12, 20, 0)], world_size=2)
    found = {collective.skew for collective in analysis_of(first, second).collectives}
    assert found == {12_000, 9_000}


def test_a_rank_may_be_missing_or_killed_and_clocks_may_differ(tmp_path: Path) -> None:
    common = reduce(30, 40, 1)
    first = write(tmp_path, 0, [reduce(0, 10), common], world_size=4)
    second = write(tmp_path, 2, [reduce(12, 20), common], end=',\n{"ph": "X", "ca', world_size=4, host="algo-2")
    third = write(tmp_path, 3, [reduce(0, 15), common], end="", world_size=4)
    analysis = analysis_of(first, second, third)
    assert [len(of.rank.spans) for of in analysis.ranks] == [2, 2, 2]
    assert list(list_caveats(analysis)) == [
        "Timelines are missing (rank 1): the skew covers the other ranks only.",
        "Incomplete timelines (rank 2, 3): the process was killed, or is still running.",
        "The clocks of the hosts differ by at least 0.002 ms: skews of that size are not reliable.",
    ]


def test_several_hosts_whose_clocks_were_not_compared_are_noted(tmp_path: Path) -> None:
    assert "were not compared" in "".join(list_caveats(analysis_of(*four_ranks(tmp_path))))
    compared = analysis_of(*four_ranks(tmp_path, clock_offset_in_micros=12))
    assert list(list_caveats(compared)) == []


def test_an_object_with_trace_events_is_read_too(tmp_path: Path) -> None:
    file = tmp_path / "other.json"
    file.write_text(json.dumps({"traceEvents": [{**reduce(1, 2), "pid": 5}], "displayTimeUnit": "ms"}))
    assert trace.read_timeline([file]).ranks[0].number == 5


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not JSON"),
        ("loss: 0.3\n", "not JSON"),
        ('{"loss": [', "not JSON"),
        ('{"loss": 1}', "neither a list of events nor an object with traceEvents"),
        ("[1, 2]", "neither a list of events"),
        ("[]", "contains no spans"),
        ('[{"ph": "M", "name": "process_name", "pid": 0}]', "contains no spans"),
        ('[{"ph": "X", "pid": 0, "ts": 1}]', "ts or dur of an event is not a number of microseconds"),
        ('[{"ph": "X", "pid": 0, "ts": "a", "dur": 1}]', "is not a number of microseconds"),
        ('[{"ph": "X", "pid": "main", "ts": 1, "dur": 1}]', "pid 'main'; expected the rank"),
        ('[{"ph": "X", "pid": 0, "ts": Infinity, "dur": 1}]', "is not a number of microseconds"),
        ('[{"ph": "X", "pid": 0, "ts": 1, "dur": 1, "args": 3}]', "neither a list of events"),
        (
            '[{"ph": "M", "name": "process_name", "pid": 0, "args": {"start_time_since_epoch_in_micros": "now"}},'
            '{"ph": "X", "pid": 0, "ts": 1, "dur": 1}]',
            "start_time_since_epoch_in_micros is 'now'; expected an integer",
        ),
        (b"\xff\xfe\x00", "not text"),
    ],
)
def test_invalid_timelines_are_errors(tmp_path: Path, text: str | bytes, words: str) -> None:
    file = tmp_path / "wrong.json"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(TraceError, match=f"^{re.escape(str(file))}: .*{words}"):
        trace.read_timeline([file])


@pytest.mark.parametrize(
    ("rank", "begin", "about", "words"),
    [
        (0, 0, {}, "both are rank 0"),
        (1, 0, {"world_size": 4}, "2 ranks, job algo-1:7592, and 4 ranks"),
        (1, 0, {"job": "b:1"}, "job algo-1:7592, and 2 ranks, job b:1"),
        (1, 11, {}, "one ended before the other began"),
    ],
)
def test_files_of_two_jobs_are_refused(
    tmp_path: Path, rank: int, begin: int, about: dict[str, Any], words: str
) -> None:
    (tmp_path / "other").mkdir()
    first = write(tmp_path, 0, [reduce(0, 10)], world_size=2)
    other = write(tmp_path / "other", rank, [reduce(begin, 20)], **{"world_size": 2, **about})
    with pytest.raises(TraceError, match=words) as caught:
        trace.read_timeline([first, other])
    assert str(first) in str(caught.value)
    assert str(other) in str(caught.value)


def test_a_directory_stands_for_the_timelines_below_it(tmp_path: Path) -> None:
    for host in ("algo-1", "algo-2"):
        (tmp_path / host).mkdir()
        (tmp_path / host / "results.json").write_text("{}")
    files = (write(tmp_path / "algo-1", 0, []), write(tmp_path / "algo-2", 1, []))
    assert trace.find_files([tmp_path]) == files
    assert trace.find_files([*files, tmp_path]) == files


def test_missing_path_is_an_error_with_a_suggestion(tmp_path: Path) -> None:
    file = write(tmp_path, 0, [])
    with pytest.raises(UsageError, match=f"no such file or directory. Did you mean '{file.name}'"):
        trace.find_files([file.with_name("smdataparallel_timeline_9.json")])
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"empty: contains no smdataparallel_timeline\*\.json"):
        trace.find_files([tmp_path / "empty"])


def test_the_page_has_every_rank_and_bar_and_needs_no_other_file(tmp_path: Path) -> None:
    html = timeline_page.render_timeline_page(analysis_of(*four_ranks(tmp_path, host="<algo>")))
    for rank in range(4):
        assert f">rank {rank}</b>" in html
    bars = re.findall(r'<rect class="(\w+)" x="([\d.]+)" y="(\d+)" width="([\d.]+)"', html)
    whole, usual, longest = 40, 4, 4
    assert sum(kind == "communication" for kind, *_ in bars) == whole + usual + longest
    assert all(float(x) >= 0 and float(x) + float(width) <= timeline_page.UNITS + 0.02 for _, x, _, width in bars)
    assert "1.00 kB in 30.0 µs, 0.0333 GB/s" in html
    assert "<td>100%</td>" in html
    assert "&lt;algo&gt;" in html
    assert "<algo>" not in html
    assert not re.search(r"(src|href)=|url\(|@import", html)


def test_the_exposed_part_is_drawn_over_its_span(tmp_path: Path) -> None:
    html = timeline_page.render_timeline_page(analysis_of(write(tmp_path, 0, [span(COMPUTE, 0, 60), reduce(40, 100)])))
    assert re.search(r'<rect class="communication" x="4000.0" y="(\d+)" width="6000.0"', html)
    assert re.search(r'<rect class="exposed" x="6000.0" y="(\d+)" width="4000.0"', html)
    assert "40.0 µs of it exposed" in html


def test_a_long_recording_is_drawn_with_a_bounded_number_of_bars(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeline_page, "_MAX_BARS", 300)
    events = [reduce(at, at + 1, size=10) for at in range(0, 40_000, 2)]
    html = timeline_page.render_timeline_page(analysis_of(write(tmp_path, 0, events)))
    assert html.count("<rect") < 3 * 300
    assert "spans, the longest all_reduce, bucket" not in html  # the span stands for several buckets
    assert "spans, the longest all_reduce\n" in html


def test_steps_that_are_not_recorded_are_found_by_the_most_frequent_collective(tmp_path: Path) -> None:
    events = [reduce(at + 10 * bucket, at + 10 * bucket + 5, bucket) for at in (0, 100, 220) for bucket in (0, 1)]
    timeline = trace.read_timeline([write(tmp_path, 0, events)])
    assert timeline_page.find_steps(timeline) == [(0, 100_000), (100_000, 220_000)]


@pytest.mark.parametrize(
    ("width", "last", "count"),
    [
        (10, "10 ns", 11),
        (1_000_000, "1000 µs", 11),
        (2_500_000_000, "2500 ms", 6),
        (45_000_000_000, "45 s", 10),
        (0, "0 ns", 1),
    ],
)
def test_ticks_are_round_and_few(width: int, last: str, count: int) -> None:
    found = list(timeline_page.make_ticks(width))
    assert len(found) == count
    assert found[0][0] == 0
    assert found[-1] == (width, last)


@pytest.mark.parametrize(
    ("nanoseconds", "text"),
    [(0, "0 ns"), (999, "999 ns"), (1500, "1.50 µs"), (12_345_678, "12.3 ms"), (999_400_000, "999 ms"), (None, "–")],
)
def test_times_have_three_digits(nanoseconds: int | None, text: str) -> None:
    assert format_time(nanoseconds) == text


@pytest.mark.parametrize("as_json", [False, True])
def test_input_is_not_overwritten(tmp_path: Path, as_json: bool) -> None:
    file = write(tmp_path, 0, [reduce(0, 1)])
    before = file.read_text()
    with pytest.raises(ShoalError, match="choose a name"):
        write_timeline_report([tmp_path], file.with_suffix(".html") if as_json else file, as_json)
    assert file.read_text() == before


def shoal(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [*shoal_command(), "timeline", *arguments]
    env = {**os.environ, "COLUMNS": "100"}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)


def test_the_command_prints_the_summary_and_writes_the_page_and_the_trace(tmp_path: Path) -> None:
    four_ranks(tmp_path, host="algo-1")
    result = shoal(".", "-o", "out.html", "--json", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "Rank 2 is the straggler" in result.stdout
    row = r"^ +2 +90\.0 µs +33% +250 µs +0 ns +100% +0\.0400 GB/s +10 +5\.00 µs *$"
    assert re.search(row, result.stdout, re.MULTILINE)
    assert re.search(r"^ +rank +step +idle +communication +exposed +overlap +bandwidth", result.stdout, re.MULTILINE)
    assert (tmp_path / "out.html").read_text().startswith("<!doctype html>")
    assert {event["pid"] for event in json.loads((tmp_path / "out.json").read_text())} == {0, 1, 2, 3}


def test_the_command_fails_with_the_code_of_its_error(tmp_path: Path) -> None:
    (tmp_path / "loss.json").write_text("0.3")
    result = shoal("loss.json", cwd=tmp_path)
    assert (result.returncode, result.stdout) == (TraceError.exit_code, "")
    assert result.stderr.startswith("shoal: loss.json: neither")
    assert shoal("missing.json", cwd=tmp_path).returncode == UsageError.exit_code
    write(tmp_path, 0, [reduce(0, 1)])
    unwritable = shoal(".", "-o", "no/such/page.html", cwd=tmp_path)
    assert unwritable.returncode == UsageError.exit_code
    assert "no/such/page.html: no/such is not a directory. Fix: mkdir" in unwritable.stderr
    assert "-o .: is a directory" in shoal(".", "-o", ".", "--json", cwd=tmp_path).stderr
