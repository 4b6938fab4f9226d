"""`shoal timeline`: reads the timelines of a job's ranks, and writes an HTML page and a merged trace."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from shoal.console import print_line
from shoal.report import output_files, timeline_page, timeline_text, trace
from shoal.report.timeline_analysis import Analysis, analyse, list_caveats


def write_timeline_report(paths: Sequence[Path], output: Path, as_json: bool) -> tuple[Analysis, list[Path]]:
    """Writes the page, and with `as_json` the merged trace next to it.

    Args:
        paths: Timelines, or directories with timelines.

    Returns:
        The analysis, and the files that were written.

    Raises:
        UsageError: If a path does not exist, or a file cannot be written.
        TraceError: If a file is not a timeline, or files are from different jobs.
        DiskError: If the disk is full.
    """
    files = trace.find_files(paths)
    page, *others = output_files.choose_files(output, as_json, files)
    analysis = analyse(trace.read_timeline(files))
    texts = {page: timeline_page.render_timeline_page(analysis)}
    texts |= {other: trace.format_merged_trace(analysis.timeline) for other in others}
    output_files.write_files(output, texts)
    return analysis, list(texts)


def print_timeline_report(console: Console, analysis: Analysis) -> None:
    """Prints the summary, caveats and a table of the ranks."""
    for sentence in (*timeline_text.summarize_timeline(analysis), *list_caveats(analysis)):
        print_line(sentence, console)
    table = Table(box=None)
    columns = [column for column in timeline_text.COLUMNS if column.on_terminal]
    for column in columns:
        table.add_column(column.name, justify="right", no_wrap=True)
    for report in analysis.ranks:
        table.add_row(*(column.text(report) for column in columns))
    console.print(table, soft_wrap=True)
