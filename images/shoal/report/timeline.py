"""`shoal report timeline`: the ranks' files in, a page, a merged trace and a few lines on the terminal out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from shoal.errors import UsageError
from shoal.report import figures, page, trace
from shoal.report.analysis import Analysis, analyse, notes


def report(paths: Sequence[Path], output: Path, as_json: bool) -> tuple[Analysis, list[Path]]:
    """Write the page, and with `as_json` the merged trace beside it; return the analysis and what was written.

    Raises `UsageError` for a path that is not there or cannot be written, and `TraceError` for files that are no
    timelines or of several jobs.
    """
    files = trace.find(paths)
    merged = output.with_suffix(".json")
    if output in files or (as_json and merged.resolve() in [file.resolve() for file in files]):
        raise UsageError(f"-o {output}: this would write over {merged}, which is read: choose another name.")
    analysis = analyse(trace.read(files))
    texts = {output: page.render(analysis)}
    if as_json:
        texts[merged] = trace.merged(analysis.timeline)
    for path, text in texts.items():
        try:
            path.write_text(text)
        except OSError as error:
            raise UsageError(f"-o {output}: {path} cannot be written: {error.strerror}") from error
    return analysis, list(texts)


def show(console: Console, analysis: Analysis) -> None:
    """Print what the timeline shows."""
    for sentence in (*figures.headline(analysis), *notes(analysis)):
        console.print(sentence, markup=False, soft_wrap=True)
    table = Table(box=None)
    columns = [column for column in figures.COLUMNS if column.is_brief]
    for column in columns:
        table.add_column(column.name, justify="right", no_wrap=True)
    for of in analysis.ranks:
        table.add_row(*(column.text(of) for column in columns))
    console.print(table, soft_wrap=True)
