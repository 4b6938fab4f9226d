"""Texts and numbers of a hostile job or timeline on our pages, in a real browser: nothing runs or loads."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver.common.by import By

from shoal.jobs.job_log import JobLog, Line
from shoal.jobs.train_events import HostOutput
from shoal.report import timeline_page, trace
from shoal.report.job_page import render_comparison_page, render_job_page
from shoal.report.job_report import Curve, JobReport
from shoal.report.timeline_analysis import analyse

from .test_pages import Browser, Show, browser, show, wait_for

__all__ = ["browser", "show"]
pytestmark = pytest.mark.xdist_group("browser")

RUN = "document.title='owned'"
HOSTILE = (
    f'</script></style></title></textarea><script>{RUN}</script><img src=x onerror="{RUN}"><svg onload="{RUN}">'
    f"<iframe src='javascript:{RUN}'></iframe><link rel=stylesheet href=data:text/css,*{{display:none}}>"
    f"<style>@import 'http://127.0.0.1/x';body{{display:none}}</style><base href=http://127.0.0.1/>"
    f'" onmouseover="{RUN}" x="\' style=\'background:url(http://127.0.0.1/y)\' \u2028\u2029\0 ${{{RUN}}} <!--<script>'
)
FOREIGN = "iframe, img, base, link, textarea, [onerror], [onload], [onmouseover], [src], [href]"


def check_page(browser: Browser) -> None:
    """Check that no text became an element, an attribute or a program, and that the page is visible."""
    assert browser.title != "owned"
    assert browser.find_elements(By.CSS_SELECTOR, FOREIGN) == []
    assert browser.find_element(By.TAG_NAME, "h1").is_displayed()


def make_report() -> JobReport:
    return JobReport(
        name=HOSTILE,
        started=HOSTILE,
        exit_code=1,
        causes=[(HOSTILE, HOSTILE)],
        summary=[(HOSTILE, HOSTILE)],
        plan=[(HOSTILE, HOSTILE)],
        reasons=[HOSTILE],
        settings={HOSTILE: {HOSTILE: HOSTILE}},
        restarts=[HOSTILE],
        metrics=[Curve(HOSTILE[:-30], HOSTILE, rank, [0.0, 1.0], [1.0, 1e308]) for rank in range(9)],
        usage=[Curve("__proto__", "constructor", None, [0.0, 1.0], [1.0, 2.0])],
        log=[Line(0.0, HOSTILE, 0, HOSTILE)],
    )


def test_texts_of_a_job_run_nothing(browser: Browser, show: Show) -> None:
    show(render_job_page(make_report()), "[aria-label=Log] div div div")
    check_page(browser)
    assert RUN in browser.find_element(By.CSS_SELECTOR, "[aria-label=Log]").text


def test_texts_of_two_jobs_run_nothing(browser: Browser, show: Show) -> None:
    show(render_comparison_page(make_report(), replace(make_report(), name=f"{HOSTILE}2")), "canvas")
    check_page(browser)


def test_texts_of_a_timeline_run_nothing(browser: Browser, show: Show, tmp_path: Path) -> None:
    args = {"bucket": HOSTILE, "group": HOSTILE, "dtype": HOSTILE, "engine": HOSTILE, "bytes": 8}
    kinds = ("communication", "compute", "step", HOSTILE)
    spans: list[dict[str, Any]] = [
        {"ph": "X", "cat": kind, "name": HOSTILE, "ts": at, "dur": 9} for kind in kinds for at in (1, 20, 40)
    ]
    for rank in range(2):
        about = {"world_size": 9, "job": HOSTILE, "host": HOSTILE}
        events = [{"ph": "M", "name": "process_name", "args": about}, *spans, {**spans[0], "ph": "i"}]
        file = tmp_path / f"smdataparallel_timeline_{rank}.json"
        file.write_text(json.dumps([{"args": args, **event, "pid": rank} for event in events]))
    show(timeline_page.render_timeline_page(analyse(trace.read_timeline(trace.find_files([tmp_path])))), ".plot rect")
    check_page(browser)


def test_a_line_neither_hides_nor_covers_other_lines(browser: Browser, show: Show) -> None:
    """Neither a line with other line ends, nor a long name of a host, nor many ranks and hosts."""
    texts = [("algo-1", "forged\u2028 line"), ("h" * 4_000, "forged line"), ("h" * 255, "forged line")]
    fields = {"shoal_event": "output", "rank": 0, "stream": 1, "form": "plain"}
    events = [json.dumps({**fields, "host": host, "text": f"{text}\n"}) for host, text in texts]
    events += [json.dumps({**fields, "host": f"host-{at}", "rank": at, "text": "line\n"}) for at in range(5_000)]
    chunks = HostOutput("algo-1", JobLog()).read(f"{event}\n".encode() for event in events)
    lines = [shown.line for chunk in chunks for shown in chunk.lines]
    show(render_job_page(replace(make_report(), log=lines, metrics=[])), "[aria-label=Log] div div div")
    rows = browser.execute_script("""
        return [...document.querySelectorAll("[aria-label=Log] div")].filter(row => !row.querySelector("div"))
          .map(row => [row.scrollHeight, row.textContent.search(/forged|line/)])""")
    assert len(rows) > 20
    assert all(height <= 20 for height, _ in rows)
    assert all(0 < begin < 80 for _, begin in [rows[0], *rows[3:]])


def test_a_page_with_the_most_curves_opens(browser: Browser, show: Show) -> None:
    """2,000 curves are the most that a log becomes: here, of many metrics, and of many ranks at different times."""
    many = [Curve(f"m{at}", "algo-1", 0, [*range(30)], [*range(30)]) for at in range(1_000)]
    wide = [Curve("loss", "h", at, [at + step * 1000.0 for step in range(30)], [*range(30)]) for at in range(1_000)]
    show(render_job_page(replace(make_report(), metrics=[*many, *wide])), "[aria-label=Log] div div div")
    wait_for(browser, lambda: len(browser.find_elements(By.TAG_NAME, "canvas")) == 1_002)
