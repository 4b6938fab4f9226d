"""Renders the page of a job, and the page that compares two: self-contained HTML files without network."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib import resources

from markupsafe import Markup

from shoal.report.job_report import JobReport, encode_report, thin_report
from shoal.report.output_files import render_page
from shoal.report.packed_log import pack_log

_VENDOR = "vendor"
_MAX_BYTES = 5_000_000 - 100  # without the digits of the lines that are left out


def render_job_page(report: JobReport) -> str:
    """Returns the page of a job as HTML, of at most 5 MB. Writes no file."""
    thin = thin_report(report)
    rest = len(_render_job(thin, "").encode("utf-8", "replace"))  # texts are in it twice, with escapes
    log = pack_log(report.log, report.omitted, report.omitted_at, _MAX_BYTES - rest)
    return _render_job(replace(thin, omitted=log.omitted, omitted_at=log.omitted_at), log.data)


def _render_job(report: JobReport, packed_log: str) -> str:
    data = Markup(encode_report(report))
    return render_page("job.html.j2", report=report, data=data, lines=packed_log, **_read_uplot())


def render_comparison_page(first: JobReport, second: JobReport) -> str:
    """Returns the page that compares two jobs as HTML: their results, differing settings and curves."""
    jobs = [thin_report(replace(report, omitted=0)) for report in (first, second)]
    return render_page(
        "job_comparison.html.j2",
        jobs=jobs,
        differences=list(list_differences(first, second)),
        data=Markup(f"[{','.join(encode_report(report) for report in jobs)}]"),
        **_read_uplot(),
    )


def list_differences(first: JobReport, second: JobReport) -> Iterator[tuple[str, str, str, str]]:
    """Yields the settings and results in which two jobs differ: section, name and both values. A missing one is "–".

    The names of the jobs themselves, such as in paths, make no difference.
    """
    sides = [{"result": dict(job.summary), "plan": dict(job.plan), **job.settings} for job in (first, second)]
    for section in dict.fromkeys([*sides[0], *sides[1]]):
        one, other = (side.get(section, {}) for side in sides)
        for name in dict.fromkeys([*one, *other]):
            values = one.get(name, "–"), other.get(name, "–")
            if values[0].replace(first.name, "") != values[1].replace(second.name, ""):
                yield section, name, *values


def _read_uplot() -> dict[str, Markup]:
    folder = resources.files("shoal.report") / _VENDOR
    names = {"uplot_program": "uPlot.iife.min.js", "uplot_style": "uPlot.min.css"}
    return {key: Markup((folder / name).read_text(encoding="utf-8")) for key, name in names.items()}
