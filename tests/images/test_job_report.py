"""The report of a job: its page for a large job, hostile log lines, masked secrets, and the comparison of two jobs."""

from __future__ import annotations

import dataclasses
import html.parser
import io
import json
import math
import random
import time
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest
from rich.console import Console

from shoal.errors import UsageError
from shoal.jobs import job_log
from shoal.jobs.job import FinishedJob, JobRequest
from shoal.jobs.job_log import JobLog, Line
from shoal.jobs.printed_metrics import LineReader
from shoal.jobs.store import JobRecord, OpenJob
from shoal.jobs.usage import CPU, MEMORY, Usage, sample_usage
from shoal.report import job_collection
from shoal.report.job_page import list_differences, render_comparison_page, render_job_page
from shoal.report.job_report import Curve, JobReport, read_report, thin_report
from shoal.report.packed_log import pack_log, unpack_log

MOST_BYTES = 5_000_000
HOSTILE = "</script><script>alert(1)</script><!-- <script> \u2028 \x00 \U0001f41f & \" ' \\"


class Scripts(html.parser.HTMLParser):
    """Collects the scripts of a page, as a browser delimits them, and the addresses that it would load."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.scripts: list[str] = []
        self.addresses: list[str] = []
        self._inside = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._inside = tag == "script"
        self.scripts += [""] * self._inside
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag: str) -> None:
        self._inside = False

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.scripts[-1] += data


def make_report(**changes: Any) -> JobReport:
    return dataclasses.replace(JobReport(name="digits-1", started="2026-01-31 12:00:00", exit_code=0), **changes)


def test_page_of_a_large_job_has_less_than_5_mb_and_the_whole_log(tmp_path: Path) -> None:
    metrics = [
        Curve(name, f"algo-{rank // 8}", rank, [*range(1000)], [rank + 1 / (at + 1) for at in range(1000)])
        for name in ("loss", "accuracy", "images_per_second")
        for rank in range(64)
    ]
    values = random.Random(0)
    log = [
        Line(at / 100, f"algo-{at % 8}", values.randrange(64), f"step {at} <loss={values.random()} lr={'=' * 40}")
        for at in range(100_000)
    ]
    page = render_job_page(make_report(metrics=metrics, log=log))
    assert len(page.encode()) <= MOST_BYTES
    (tmp_path / "report.html").write_text(page)
    report = read_report(tmp_path)
    assert (report.log, report.omitted) == (log, 0)
    assert {curve.rank for curve in report.metrics} == set(range(64))
    (tmp_path / "link.html").symlink_to("report.html")
    assert read_report(tmp_path / "link.html") == report


def test_a_page_has_at_most_60_000_points_of_curves() -> None:
    curves = [Curve("loss", "algo-1", 0, [*range(count)], [0.0] * count) for count in (60_000, 60_001)]
    thinned = [thin_report(make_report(metrics=[curve])).metrics[0] for curve in curves]
    assert [len(curve.values) for curve in thinned] == [60_000, 30_001]
    assert thinned[1].times[:3] == [0, 2, 4]


def test_a_page_of_texts_with_escapes_and_a_log_that_does_not_fit_has_at_most_5_mb() -> None:
    values = random.Random(0)
    log = [Line(at / 100, "algo-1", 0, values.randbytes(60).hex()) for at in range(60_000)]
    texts = {f"{at}<": '<"&' * 1_300 for at in range(100)}
    page = render_job_page(make_report(settings={"variables": texts}, log=log))
    assert 0.95 * MOST_BYTES < len(page.encode()) <= MOST_BYTES


def test_a_log_that_does_not_fit_keeps_both_ends_and_says_what_it_leaves_out() -> None:
    values = random.Random(0)
    log = [Line(at / 100, "algo-1", 0, f"{at} {values.randbytes(40).hex()}") for at in range(20_000)]
    packed = pack_log(log, 0, 0, 300_000)
    assert len(packed.data) <= 300_000
    assert 2_000 < len(packed.lines) < 20_000
    assert len(packed.lines) + packed.omitted == 20_000
    assert (packed.lines[0], packed.lines[-1]) == (log[0], log[-1])
    before, after = packed.lines[packed.omitted_at - 1], packed.lines[packed.omitted_at]
    assert int(after.text.split()[0]) - int(before.text.split()[0]) == packed.omitted + 1
    assert unpack_log(packed.data) == packed.lines


def test_lines_that_the_recorder_has_left_out_count_too() -> None:
    log = [Line(at / 100, "algo-1", 0, f"line {at}") for at in range(1_000)]
    assert pack_log(log, 7, 250, 100_000)[1:3] == (7, 250)
    packed = pack_log(log, 7, 250, 2_000)
    assert packed.omitted == 7 + 1_000 - len(packed.lines)
    assert 0 < packed.omitted_at < len(packed.lines)


def test_hostile_texts_end_no_script_and_are_read_back_unchanged(tmp_path: Path) -> None:
    report = make_report(
        name=HOSTILE,
        exit_code=1,
        causes=[(HOSTILE, HOSTILE)],
        log=[Line(0.0, HOSTILE, 0, HOSTILE)],
        settings={HOSTILE: {HOSTILE: HOSTILE}},
        metrics=[Curve(HOSTILE, HOSTILE, 0, [0.0], [1.0])],
    )
    page = render_job_page(report)
    (tmp_path / "report.html").write_text(page)
    assert read_report(tmp_path).log == report.log
    for text, scripts in ((page, 4), (render_comparison_page(report, report), 3)):
        found = Scripts(text)
        assert len(found.scripts) == scripts
        assert not any("alert(1)" in script for script in found.scripts[1:])
        assert found.addresses == []  # the page works without a network


def test_comparison_lists_differences_only_and_draws_both_jobs() -> None:
    curve = Curve("loss", "algo-1", 0, [0.0, 1.0], [2.0, 1.0])
    first = make_report(settings={"hyperparameters": {"lr": "0.1", "epochs": "2"}}, metrics=[curve])
    second = dataclasses.replace(first, name="digits-2", settings={"hyperparameters": {"lr": "0.2", "epochs": "2"}})
    second = dataclasses.replace(second, settings={**second.settings, "variables": {"A": "1"}})
    first, second = (dataclasses.replace(job, plan=[("cwd", f"/jobs/{job.name}/code")]) for job in (first, second))
    assert list(list_differences(first, second)) == [
        ("hyperparameters", "lr", "0.1", "0.2"),
        ("variables", "A", "–", "1"),
    ]
    data = json.loads(Scripts(render_comparison_page(first, second)).scripts[0])
    assert [(job["name"], len(job["metrics"])) for job in data] == [("digits-1", 1), ("digits-2", 1)]


def test_a_file_that_is_no_report_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text("<p>another page</p>")
    with pytest.raises(UsageError, match="not the report of a job"):
        read_report(tmp_path)
    with pytest.raises(UsageError, match="No such file"):
        read_report(tmp_path / "missing.html")


def test_numbers_of_a_line_are_metrics_and_a_step() -> None:
    line = "loss=0.25 lr=1e-3, name=x path=1.2.3 big=1e999 step=7"
    assert LineReader().read(line) == ({"loss": 0.25, "lr": 0.001}, ("step", 7.0))


@pytest.mark.parametrize(("step", "axis"), [("step {0}", "step"), ("epoch {0} iterations 12", ""), ("", "")])
def test_steps_that_tell_no_values_apart_are_no_axis(tmp_path: Path, step: str, axis: str) -> None:
    opened = open_finished_job(tmp_path)
    for at in range(4):
        opened.log.add("algo-1", f"{step.format(at)} loss {at}.5")
    (curve,) = job_collection.collect_report(opened, None).metrics
    assert (curve.x_name, len(curve.xs), len(curve.times)) == (axis, 4 if axis else 0, 4)


def test_log_keeps_its_ends_and_a_long_series_keeps_its_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_log, "_HALF", 10)
    log = JobLog()
    for at in range(5000):
        log.add("algo-1", f"value={at}", rank=1)
    assert [line.text for line in log.lines] == [f"value={at}" for at in (*range(10), *range(4990, 5000))]
    assert (log.omitted, log.omitted_at) == (4980, 10)
    values = log.series["value", "algo-1", 1].values
    assert len(values) <= 1000
    assert values[0] == 0
    assert values[-1] > 4900


def open_finished_job(directory: Path, **options: Any) -> OpenJob:
    request = JobRequest(source=directory, entry_point="train.py", **options)
    return OpenJob(
        "digits-1", directory, JobRecord(dataclasses.replace(request, image="image:1")), cast(Any, None), False
    )


def test_secrets_are_masked_everywhere(tmp_path: Path) -> None:
    secrets = {"API_TOKEN": "abcdef123456", "SHOAL_JOB_SECRET": "0123456789abcdef"}
    opened = open_finished_job(
        tmp_path, environment={**secrets, "LEVEL": "debug"}, hyperparameters={"db_password": "hunter2-x", "lr": "0.1"}
    )
    for value in (*secrets.values(), "hunter2-x", "debug", "0.1"):
        opened.log.add("algo-1", f"the value is {value}.")
    masked = {"API_TOKEN": "******", "SHOAL_JOB_SECRET": "******", "LEVEL": "debug"}
    plan = {
        "launcher": "mpi",
        "notes": ["launcher mpi: two ranks"],
        "variables": masked,
        "environment": {"SM_HPS": '{"db_password": "******", "lr": 0.1}'},
    }
    result = FinishedJob("digits-1", 1, tmp_path, {}, {}, {}, {"algo-1": "hunter2-x failed"}, plan=plan)
    report = job_collection.collect_report(opened, result)
    page = render_job_page(report)
    assert not [secret for secret in (*secrets.values(), "hunter2-x") if secret in page]
    assert [line.text for line in report.log][-2:] == ["the value is debug.", "the value is 0.1."]
    assert report.causes == [("algo-1", "****** failed")]
    assert report.settings["hyperparameters"] == {"db_password": "******", "lr": "0.1"}
    assert report.settings["variables"] == masked
    assert report.reasons == ["launcher mpi: two ranks"]


def test_values_are_masked_if_train_has_not_named_the_secrets(tmp_path: Path) -> None:
    defined = {"sagemaker_metric_definitions": "[]"}
    opened = open_finished_job(tmp_path, environment={"PLAIN": "perhaps-secret"}, hyperparameters={"a": "b", **defined})
    opened.log.add("algo-1", "perhaps-secret")
    report = job_collection.collect_report(opened, None)
    assert "perhaps-secret" not in render_job_page(report)
    assert report.settings["hyperparameters"] == {"a": "******", **defined}
    assert report.exit_code is None


def test_metric_definitions_come_before_numbers_in_the_log(tmp_path: Path) -> None:
    opened = open_finished_job(tmp_path)
    opened.log.add("algo-1", "other=1", rank=0)
    assert [curve.name for curve in job_collection.collect_report(opened, None).metrics] == ["other"]
    opened.log.began = time.time() - 0.5
    for value in (0.25, math.nan):
        opened.log.add_metric(("loss", "algo-1", 1), value)
    (curve,) = job_collection.collect_report(opened, None).metrics
    assert (curve.name, curve.rank, [*curve.values]) == ("loss", 1, [0.25])
    assert [*curve.times] == pytest.approx([0.5], abs=0.4)
    assert [mark[1:] for mark in curve.marks] == [(None, "nan")]
    assert {name: str(value) for (name, _, _), value in opened.log.not_finite.items()} == {"loss": "nan"}
    opened.log.add("algo-1", "loss=3")
    opened.log.defined["loss", "algo-1", 1].add(1.0, 0.125)
    assert opened.log.last_metrics == {"other": 1.0, "loss": 0.125}


def test_a_report_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "report.html").mkdir()
    screen = io.StringIO()
    assert job_collection.write_job_report(Console(file=screen), open_finished_job(tmp_path), None) is None
    assert "warning: the report" in screen.getvalue()


def test_usage_is_measured_per_host_and_errors_do_not_matter() -> None:
    series: dict[job_log.Key, job_log.Series] = {}
    with sample_usage(series, 0.0, lambda: {"algo-1": Usage(1.0, 5_000_000)}):
        pass
    assert [*series["memory (MB)", "algo-1", None].values] == [5.0]
    assert {name for name, _, _ in series} <= {CPU, MEMORY}
    measure = Mock(side_effect=OSError("Docker has gone"))
    with sample_usage(series, 0.0, measure):
        pass
    measure.assert_called_with()
