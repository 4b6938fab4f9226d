"""Attacks by what a script prints and writes: its job's report, the summary, timelines and the log stay usable."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
from rich.console import Console

from shoal.clean_text import clean_message
from shoal.docker_client import containers
from shoal.errors import DiskError, TraceError, UsageError
from shoal.jobs import source_files, summary, volumes
from shoal.jobs.checkpoints import copy_tree, open_directory
from shoal.jobs.hosts import docker_objects
from shoal.jobs.hosts.docker import DockerHosts
from shoal.jobs.job import FinishedJob, JobRequest
from shoal.jobs.job_log import JobLog
from shoal.jobs.printed_metrics import LineReader
from shoal.jobs.source_files import Selection
from shoal.jobs.store import JobRecord, OpenJob
from shoal.jobs.train_events import HostOutput
from shoal.jobs.usage import GpuMeter, GpuUse, read_lines
from shoal.jobs.volumes import Volume
from shoal.limits import MIB
from shoal.report import job_collection, timeline_page
from shoal.report.job_report import read_report
from shoal.report.packed_log import unpack_log

MOST_PAGE = 6_000_000


def record(**changes: Any) -> str:
    return json.dumps({"shoal_event": "metric", "host": "algo-1", "rank": 0, "name": "loss", "value": 1, **changes})


def test_numbers_of_a_line_are_found_at_once() -> None:
    """A line of digits took 0.6 s, and readers of the log fell behind."""
    began = time.monotonic()
    for _ in range(50):
        assert LineReader().read("loss=" + "1" * 1900 + "x b=" + "1" * 1900 + "ex c=1.5 acc=1").metrics == {
            "c": 1.5,
            "acc": 1,
        }
    assert time.monotonic() - began < 5


METRICS = {
    "infinite": [record(value="Infinity"), record(value="1e999"), record(value="NaN")],
    "surrogates": [record(name="\ud800", host="\udfff")],
    "thousands of long names": [record(name=f"{at}" + "x" * 10_000) for at in range(1_500)],
    "odd ranks": [record(rank=-1), record(rank=10**400), record(rank=True), record(rank=1.5)],
}
REPORTS: dict[str, dict[str, Any]] = {
    "a metric of megabytes": {"metrics": {"test_accuracy": "x\n" * 4_000_000}},
    "thousands of restarts": {"restarts": [{"number": at, "reason": "exit code 0 " * 9} for at in range(50_000)]},
    "thousands of notes": {"plan": {"notes": ["<note>" * 9] * 50_000}},
    "thousands of variables": {"plan": {"environment": {f"<{at}>": "<" * 200 for at in range(50_000)}}},
    "odd names of lost files": {"exit_code": 0, "lost_files": ("\udcff\n\x1b]0;x\x07", "</script><b>", "\u202e")},
    "a failure of 30,000 lines": {"messages": {"algo-1": "exit code 0\n" * 5_000}},
}


@pytest.mark.parametrize("metrics", METRICS.values(), ids=METRICS)
def test_hostile_metrics_are_read_back(tmp_path: Path, metrics: list[str]) -> None:
    check_report(tmp_path, "\n".join([*metrics, record(name="good")]), {})
    assert "good" in {curve.name for curve in read_report(tmp_path).metrics}


@pytest.mark.parametrize("changes", REPORTS.values(), ids=REPORTS)
def test_a_hostile_result_fills_neither_page_nor_terminal(tmp_path: Path, changes: dict[str, Any]) -> None:
    result = check_report(tmp_path, record(), changes)
    console = Console(file=io.StringIO(), width=100)
    summary.print_summary(console, JobRequest(), result)
    assert len(cast(io.StringIO, console.file).getvalue().splitlines()) < 1_000


def check_report(directory: Path, metrics: str, changes: dict[str, Any]) -> FinishedJob:
    """Write the report of a job, and check that it is not large and can be read again."""
    (directory / "algo-1" / "output").mkdir(parents=True)
    log = JobLog(began=0.0)
    list(HostOutput("algo-1", log).read([metrics.encode()]))
    fields: dict[str, Any] = {"name": "j", "exit_code": 3, "directory": directory}
    fields |= {"archives": {}, "launch": {}, "metrics": {}, "messages": {}}
    result = FinishedJob(**{**fields, **changes})
    outputs = {"algo-1": directory / "algo-1" / "output"}
    opened = SimpleNamespace(
        name="j",
        directory=directory,
        outputs=outputs,
        record=JobRecord(JobRequest(image="i:1")),
        log=log,
    )
    page = job_collection.write_job_report(Mock(), cast(OpenJob, opened), result)
    assert page is not None
    assert page.stat().st_size < MOST_PAGE
    read_report(directory)
    return result


def test_a_message_has_a_largest_number_of_lines() -> None:
    assert len(clean_message("x\n" * 1_000_000).splitlines()) < 600
    assert clean_message("\n".join("ab")).splitlines() == ["a", "  b"]


SPAN = {"ph": "X", "pid": 0, "cat": "communication", "name": "all_reduce", "ts": 1, "dur": 5, "args": {"bytes": 8}}
ABOUT = {"world_size": 1, "job": "j", "host": "h"}
TIMELINES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a trillion ranks": ({}, {"world_size": 10**12}),
    "a world size in words": ({}, {"world_size": "x"}),
    "a time with 400 digits": ({"ts": 10**400}, {}),
    "a duration of ages": ({"dur": 1e300}, {}),
    "an end before its begin": ({"dur": -5}, {}),
    "a rank with 4,000 digits": ({"pid": 10**4000}, {}),
    "a list as rank": ({"pid": [1]}, {}),
    "true as rank": ({"pid": True}, {}),
    "an epoch with 400 digits": ({}, {"start_time_since_epoch_in_micros": 10**400}),
}
READABLE: dict[str, dict[str, Any]] = {
    "bytes with 400 digits": {"args": {"bytes": 10**400}},
    "a list as category": {"cat": ["a"]},
    "a list as name": {"name": ["a"]},
    "a number as name": {"name": 5},
    "a list as bucket": {"args": {"bucket": [1], "group": {"a": 1}, "operation": []}},
    "megabytes as bucket": {"args": {"bucket": "x" * 5_000_000}},
    "megabytes as name": {"name": "x" * 5_000_000},
}


def write_timeline(directory: Path, span: dict[str, Any], about: dict[str, Any]) -> Path:
    """Write the timelines of two ranks, of which the first is changed, and return the page."""
    for rank, (changes, facts) in enumerate([(span, about), ({}, {})][: 1 if about else 2]):
        named = {"ph": "M", "name": "process_name", "pid": changes.get("pid", rank), "args": {**ABOUT, **facts}}
        events = [named, {**SPAN, "pid": rank, **changes}]
        (directory / f"smdataparallel_timeline_{rank}.json").write_text(json.dumps(events))
    page = directory / "page.html"
    timeline_page.write_timeline_report([directory], page, as_json=True)
    return page


@pytest.mark.parametrize(("span", "about"), TIMELINES.values(), ids=TIMELINES)
def test_a_timeline_with_numbers_of_no_job_is_an_error(
    tmp_path: Path, span: dict[str, Any], about: dict[str, Any]
) -> None:
    with pytest.raises(TraceError) as caught:
        write_timeline(tmp_path, span, about)
    assert len(str(caught.value)) < 1_000


@pytest.mark.parametrize("span", READABLE.values(), ids=READABLE)
def test_a_timeline_with_odd_texts_is_read(tmp_path: Path, span: dict[str, Any]) -> None:
    assert write_timeline(tmp_path, span, {}).stat().st_size < 100_000


def test_a_timeline_that_fills_the_memory_is_an_error(tmp_path: Path) -> None:
    with (tmp_path / "smdataparallel_timeline_0.json").open("wb") as file:
        file.truncate(64 << 30)
    with pytest.raises(TraceError, match="larger than"):
        timeline_page.write_timeline_report([tmp_path], tmp_path / "page.html", as_json=False)


def test_a_report_that_fills_the_memory_is_an_error(tmp_path: Path) -> None:
    """A page of 61 MB took 2 GB."""
    report = tmp_path / "report.html"
    report.write_text(
        '<script type="application/json" id="job">{"summary": [' + '["", ""],' * 1_000_000 + "]}</script>"
    )
    with pytest.raises(UsageError, match="larger than 8,388,608 bytes"):
        read_report(report)


def test_a_log_that_unpacks_to_gigabytes_is_refused() -> None:
    packed = zlib.compressobj()
    pieces = [packed.compress(b" " * (1 << 20)) for _ in range(200)]
    with pytest.raises(ValueError, match="Expecting value"):
        unpack_log(base64.b64encode(b"".join([*pieces, packed.compress(b"[[],[],[],[],[]]"), packed.flush()])).decode())


@pytest.mark.parametrize("engine", ["docker", "none"])
def test_a_checkpoint_with_holes_does_not_fill_a_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    """It takes no space in its directory. In the copy of a job, it would take its whole size."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "copy").mkdir()
    with (tmp_path / "mine" / "step").open("wb") as file:
        file.truncate(60 * MIB)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=50 * MIB))
    with open_directory(tmp_path / "mine", "digits", "--checkpoints") as opened:
        out = io.BytesIO()
        with pytest.raises(DiskError, match="step: it has 62,914,560 bytes"):
            opened.pack("x", out, (0, 0)) if engine == "docker" else opened.copy_to(tmp_path / "copy")
    assert len(out.getvalue()) < MIB
    assert not (tmp_path / "copy" / "step").exists()


def test_holes_of_checkpoints_stay_holes_in_a_job_without_docker(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    with (tmp_path / "mine" / "step").open("wb") as file:
        file.truncate(60 * MIB)
    (tmp_path / "copy").mkdir()
    copy_tree(tmp_path / "mine", tmp_path / "copy")
    copied = (tmp_path / "copy" / "step").stat()
    assert (copied.st_size, copied.st_blocks) == (60 * MIB, 0)


def test_file_systems_below_a_read_only_directory_are_mounted_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Docker before 25 leaves them writable: a script could remove files of the user."""
    (tmp_path / "data" / "a b" / "c").mkdir(parents=True)
    table = tmp_path / "mountinfo"
    rows = [f"{tmp_path}/data/a\\040b", f"{tmp_path}/data", f"{tmp_path}/data/a\\040b/c", "/", f"{tmp_path}/data/gone"]
    table.write_text("".join(f"1 1 0:1 / {row} rw - tmpfs none rw\n" for row in rows))
    found = [tmp_path / "data" / "a b", tmp_path / "data" / "a b" / "c"]
    assert volumes.list_mounts(tmp_path / "data", table) == found
    monkeypatch.setattr(volumes, "list_mounts", lambda _: found)
    request = JobRequest(channels={"x": tmp_path / "data"}, volumes=(Volume(tmp_path / "data", "/w"),))
    mounts = docker_objects.container_settings(request, "j", "j", "n")["mounts"]
    places = [(mount["Target"], mount["ReadOnly"]) for mount in mounts if mount["Type"] == "bind"]
    below = "/opt/ml/input/data/x"
    assert places == [(below, True), (f"{below}/a b", True), (f"{below}/a b/c", True), ("/w", False)]


def test_dockers_own_log_has_a_limit() -> None:
    """Also of `shoal estimate`, `shell` and `lock`."""
    client = Mock()
    containers.create_container(client, "image:1", [], {"name": "a"})
    settings = client.containers.create.call_args.kwargs
    assert settings["log_config"]["Config"]["max-size"] and settings["pids_limit"] > 0 and settings["name"] == "a"


def test_a_program_in_the_place_of_nvidia_smi_fills_no_memory() -> None:
    meter = GpuMeter()
    lines = [f"{index}, 5, 10" for index in range(5_000)]
    read_lines([*lines, "0, 5, " + "9" * 5_000, "0, " + "9" * 400 + ", 7", "0, 5, \u0665"], "algo-1", meter)
    assert meter.read("algo-1") == GpuUse(5.0, (999 * 10 + 7) << 20)


@pytest.mark.parametrize(
    ("hosts", "numbers", "threads", "most"),
    [
        (1, "32768", "190000", 16_384),
        (4, "32768", "190000", 4_096),
        (100, "32768", "190000", 1_024),
        (1, None, None, 16_384),
        (2, "131072", "190000", 32_768),
        (1, "4194304", "190000", 95_000),
        (1, "4194304", "15000", 7_500),
    ],
)
def test_a_script_cannot_take_all_processes_of_the_machine(
    monkeypatch: pytest.MonkeyPatch, hosts: int, numbers: str | None, threads: str | None, most: int
) -> None:
    """It may fork for ever, and Docker needs a process to end it."""
    given = {"/proc/sys/kernel/pid_max": numbers, "/proc/sys/kernel/threads-max": threads}
    read = Path.read_text

    def read_limit(path: Path, *arguments: Any) -> str:
        found = given.get(str(path), "") if str(path) in given else read(path, *arguments)
        if found is None:
            raise OSError("no such limit")
        return found

    monkeypatch.setattr(Path, "read_text", read_limit)
    settings = docker_objects.container_settings(JobRequest(hosts=hosts), "j", "j", "n")
    assert settings["pids_limit"] == most


CLOSED = """
import os, sys
from pathlib import Path
from shoal.jobs.checkpoints import open_directory
from shoal.jobs.checkpoints import collect_tree
if not os.geteuid(): os.setgid(65534); os.setuid(65534)
os.umask(0o022)
tree, kept, copied = (Path(sys.argv[1], name) for name in ("algo-1", "kept", "copied"))
for number in range(3):
    place = tree / "checkpoints" / "sub"
    place.mkdir(parents=True, exist_ok=True)
    (place / "step").write_text(str(number))
    (place / "step").chmod(0)
    (place / "sub").mkdir(exist_ok=True)
    for directory, mode in ((place / "sub", 0), (place, 0o500), (place.parent, 0o500)): directory.chmod(mode)
    with open_directory(kept, "job", "--checkpoints") as opened:
        collect_tree(tree, opened)
    assert (kept / "sub" / "step").read_text() == str(number)
    with open_directory(kept, "job", "--checkpoints") as opened:
        (copied / str(number)).mkdir(parents=True)
        opened.copy_to(copied / str(number))
print(sorted(os.listdir(sys.argv[1])))
"""


def test_a_script_that_closes_its_directories_keeps_no_job_from_going_on() -> None:
    """Without Docker and root. The second `--resume` named a scratch directory that cannot be removed."""
    with tempfile.TemporaryDirectory() as directory:
        if not os.geteuid():
            os.chown(directory, 65534, 65534)
        words: list[str | Path] = [sys.executable, "-c", CLOSED, directory]
        environment = {**os.environ, "HOME": "/nonexistent"}
        ended = subprocess.run(words, env=environment, cwd="/", capture_output=True, text=True, check=False)
    assert ended.stdout == "['algo-1', 'copied', 'kept']\n", ended.stderr


@pytest.mark.parametrize(("size", "most"), [(0, 20_000), (1 << 43, 1)])
def test_many_or_huge_files_beside_the_code_do_not_keep_a_job(
    monkeypatch: pytest.MonkeyPatch, size: int, most: int
) -> None:
    """Docker took ten minutes to list 20,000 files in deep directories, and the success became an error."""

    def pack() -> Iterator[bytes]:
        for at in range(20_000):
            entry = tarfile.TarInfo("code" + "/d" * 40 + f"/{at}")
            entry.size = size
            yield entry.tobuf(tarfile.GNU_FORMAT)

    monkeypatch.setattr(containers, "read_archive", lambda *_: contextlib.nullcontext(io.BytesIO(b"".join(pack()))))
    container = SimpleNamespace(attrs={"Created": "1970-01-01T00:00:00Z"})
    hosts = SimpleNamespace(tree=io.BytesIO(bytes(10240)), by_name={"a": container}, first="a")
    began = time.monotonic()
    assert 1 <= len(DockerHosts.list_lost_files(cast(DockerHosts, hosts))) <= most
    assert time.monotonic() - began < 30


def test_a_source_that_grows_between_two_looks_fills_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").touch()
    look = source_files.list_source

    def grow(selection: Selection) -> list[source_files.SourceFile]:
        found = look(selection)
        os.truncate(tmp_path / "code" / "train.py", 1 << 43)
        return found

    monkeypatch.setattr(source_files, "list_source", grow)
    with pytest.raises(DiskError, match=r"train\.py: it has 8,796,093,022,208 bytes"):
        source_files.copy_source(Selection(tmp_path / "code", "train.py"), tmp_path / "copy")
