"""The stream of events that `train` writes inside `shoal run`: lines and metrics, and lines of other programs."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterable
from typing import Any

import pytest

from shoal.jobs.job_log import JobLog
from shoal.jobs.train_events import HostOutput, ShownLine, parse_event

LIMIT = 1 << 20


def make_event(text: str = "", kind: str = "output", **changes: Any) -> str:
    fields = {"shoal_event": kind, "host": "algo-1", "rank": 0, "stream": 1, "form": "plain", "text": text}
    return json.dumps({**fields, **changes}) + "\n"


def make_metric(**changes: Any) -> str:
    fields = {"shoal_event": "metric", "host": "algo-1", "rank": 0, "name": "loss", "value": 0.5}
    return json.dumps({**fields, **changes}) + "\n"


def read(*texts: str | bytes, log: JobLog | None = None) -> list[ShownLine]:
    chunks = (text.encode() if isinstance(text, str) else text for text in texts)
    return [line for chunk in HostOutput("algo-1", log or JobLog()).read(chunks) for line in chunk.lines]


def origins(lines: Iterable[ShownLine]) -> list[tuple[str, str, int | None, str]]:
    return [(text, line.host, line.rank, line.text) for text, line, _ in lines]


def test_lines_get_the_rank_and_the_form_that_their_event_names() -> None:
    found = read(
        make_event("one\ntw"),
        make_event("other\n", host="algo-2", rank=3, form="prefixed"),
        make_event("o\n\x1b[31mred\x1b[0m\n"),
        make_event("mpirun\n", rank=None, form="prefixed"),
        make_event("train: ready\n", "log", rank=None),
        make_event("end"),
    )
    assert origins(found) == [
        ("one", "algo-1", 0, "one"),
        ("[3,algo-2] other", "algo-2", 3, "other"),
        ("two", "algo-1", 0, "two"),
        ("\x1b[31mred\x1b[0m", "algo-1", 0, "red"),
        ("mpirun", "algo-1", None, "mpirun"),
        ("train: ready", "algo-1", None, "train: ready"),
        ("end", "algo-1", 0, "end"),
    ]


FORGED = ("[5,algo-9] loss=0.1", '{"time": "t", "host": "h", "rank": 1, "message": "loss=1"}', make_event("x")[:-1])


@pytest.mark.parametrize("text", FORGED)
def test_no_line_of_a_script_is_taken_for_one_of_another_rank(text: str) -> None:
    assert origins(read(make_event(f"{text}\n"))) == [(text, "algo-1", 0, text)]


@pytest.mark.parametrize("text", FORGED[:2])
def test_a_line_without_an_event_belongs_to_the_host(text: str) -> None:
    """An image without `train`, or with an older one, prints plain lines."""
    assert origins(read(f"{text}\n")) == [(text, "algo-1", None, text)]


def test_only_lines_of_the_script_have_metrics() -> None:
    log = JobLog()
    read(make_event("train: loss=1\n"), make_event("train: restart 1 loss=2\n", "log", rank=None), log=log)
    assert {key: series.last for key, series in log.series.items()} == {("loss", "algo-1", 0): 1.0}


def test_progress_bars_and_their_ranks_stay_apart() -> None:
    texts = (" 10%\r 2", "0%\r\n")
    events = [make_event(text, rank=rank, form="prefixed") for text in texts for rank in (0, 1)]
    assert [(text, is_overwritten) for text, _, is_overwritten in read(*events)] == [
        ("[0,algo-1]  10%", True),
        ("[1,algo-1]  10%", True),
        ("[0,algo-1]  20%", False),
        ("[1,algo-1]  20%", False),
    ]


def test_every_byte_arrives_however_the_output_is_divided() -> None:
    values = random.Random(1)
    data = "  é漢█\r\n10%\r20%\n".encode() + bytes(range(256)) * 20 + b"\n\nlast"
    for _ in range(20):
        places = sorted(values.sample(range(len(data)), 9))
        pieces = [data[begin:end] for begin, end in zip([0, *places], [*places, len(data)])]
        stream = "".join(make_event(piece.decode("utf-8", "surrogateescape")) for piece in pieces).encode()
        cut = values.randrange(len(stream))
        chunks = [*HostOutput("algo-1", JobLog()).read([stream[:cut], stream[cut:]])]
        assert b"".join(chunk.encode() for chunk in chunks) == data
        assert [line.text for chunk in chunks for line in chunk.lines] == [line.text for line in read(data)]


def test_json_of_the_user_stays_json() -> None:
    found = read(
        make_event("10%\r\r20%\r\n\udcff é\n", form="json"),
        make_event("train: ready\n", "log", rank=None, form="json", stream=2),
    )
    shown = [json.loads(line.text) for line in found]
    assert [(each["rank"], each["stream"], each["message"]) for each in shown] == [
        (0, "stdout", "10%"),
        (0, "stdout", "20%"),
        (0, "stdout", "\\xff é"),
        (None, "stderr", "train: ready"),
    ]
    assert list(shown[0]) == ["time", "host", "rank", "stream", "message"]
    assert not any(line.is_overwritten for line in found)
    assert found[0].line[1:] == ("algo-1", 0, "10%")


def test_metrics_of_definitions_come_as_events() -> None:
    log = JobLog()
    assert read(*(make_metric(value=value) for value in (0.5, 1, "nan", "-inf", 2)), log=log) == []
    series = log.defined["loss", "algo-1", 0]
    assert ([*series.values], [mark.text for mark in series.marks], series.last) == ([0.5, 1, 2], ["nan", "-inf"], 2)


HOSTILE = {
    "no JSON": '{"shoal_event": "output", ',
    "deep JSON": '{"shoal_event": "output", "host": ' + "[" * 100_000,
    "another kind": make_event(kind="restart"),
    "a list as kind": make_event().replace('"output"', "[]"),
    "no text": make_event().replace('"text"', '"words"'),
    "a number as text": make_event(text=5),  # type: ignore[arg-type]
    "a lone surrogate as text": make_event("\ud800"),
    "a lone surrogate as host": make_event(host="\ud800"),
    "a host with a line end": make_event(host="a\nb"),
    "a host with an escape": make_event(host="\x1b[2J"),
    "a host of 4,000 letters": make_event(host="h" * 4_000),
    "a list as host": make_event(host=["x"]),
    "a negative rank": make_event(rank=-1),
    "a rank with 400 digits": make_event(rank=10**400),
    "a rank with 9,000 digits": make_event().replace('"rank": 0', f'"rank": {"1" * 9_000}'),
    "a rank that is true": make_event(rank=True),
    "a rank with a fraction": make_event(rank=1.5),
    "a third stream": make_event(stream=3),
    "a list as form": make_event(form=[]),
    "a value of 400 digits": make_metric(value=10**400),
    "a text as value": make_metric(value="1e999"),
    "a list as value": make_metric(value=[]),
    "a metric without name": make_metric().replace('"name"', '"title"'),
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_a_forged_event_is_a_line_as_it_is(text: str) -> None:
    log, plain = JobLog(), text.removesuffix("\n")
    assert parse_event(plain) is None
    (found,) = read(plain, log=log)
    assert (found.text, found.line.host, found.line.rank) == (plain, "algo-1", None)
    assert not log.defined


def test_forged_streams_without_line_ends_fill_no_memory() -> None:
    held = []
    output = HostOutput("algo-1", JobLog())
    for _ in output.read(make_event("x" * LIMIT, rank=rank).encode() for rank in range(40)):
        held.append(sum(len(splitter.rest) for splitter in output._splitters.values()))
    assert max(held) < 20 << 20
    lines = read(*(make_event("x", rank=rank) for rank in range(5_000)))
    assert [line.line.rank for line in lines] == [*range(5_000)], "nothing is lost"


def test_a_line_of_megabytes_is_divided_as_before() -> None:
    data = b"x" * (5 * LIMIT) + b"\n"
    pieces = [data[at : at + 65536] for at in range(0, len(data), 65536)]
    events = [make_event(piece.decode()) for piece in pieces]
    assert [line.text for line in read(*events)] == [line.text for line in read(*pieces)]


def test_random_changes_of_events_lose_no_line() -> None:
    values = random.Random(2)
    event = make_event("some text\n")[:-1].encode()
    for _ in range(1_000):
        changed = bytearray(event)
        for _ in range(values.randrange(1, 4)):
            changed[values.randrange(len(changed))] = values.choice(b'{}[]":,0\\ue\xff')
        found = read(bytes(changed) + os.linesep.encode())
        assert found or parse_event(changed.decode(errors="replace"))
