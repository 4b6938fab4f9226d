"""`shoal report timeline`: the ranks' files in, a page, a merged trace and a few lines on the terminal out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from shoal.report import output_files, timeline_page, timeline_text, trace
from shoal.report.timeline_analysis import Analysis, analyse, notes


def report(paths: Sequence[Path], output: Path, as_json: bool) -> tuple[Analysis, list[Path]]:
    """Write the page, and with `as_json` the merged trace beside it; return the analysis and what was written.

    Raises `UsageError` for a path that is not there or cannot be written, and `TraceError` for files that are no
    timelines or of several jobs.
    """
    read = trace.find(paths)
    page_file, *others = output_files.targets(output, as_json, read)
    analysis = analyse(trace.read(read))
    texts = {
        page_file: timeline_page.render(analysis),
        **{beside: trace.merged(analysis.timeline) for beside in others},
    }
    output_files.write(output, texts)
    return analysis, list(texts)


def show(console: Console, analysis: Analysis) -> None:
    """Print what the timeline shows."""
    for sentence in (*timeline_text.headline(analysis), *notes(analysis)):
        console.print(sentence, markup=False, soft_wrap=True)
    table = Table(box=None)
    columns = [column for column in timeline_text.COLUMNS if column.is_brief]
    for column in columns:
        table.add_column(column.name, justify="right", no_wrap=True)
    for of in analysis.ranks:
        table.add_row(*(column.text(of) for column in columns))
    console.print(table, soft_wrap=True)
