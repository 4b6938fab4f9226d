"""`shoal size`: reads one or two images, and writes an HTML page and their inventories as JSON.

It also prints the largest layers and packages, or changes, on the terminal.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import docker
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from shoal import docker_client
from shoal.console import print_line
from shoal.docker_client.images import describe_missing, find_image
from shoal.errors import UsageError
from shoal.layers import inventory
from shoal.layers.inventory import Inventory, Sum
from shoal.layers.saved_image import Blobs
from shoal.matrix.spec import BuildSpec
from shoal.report import output_files, size_document, size_page, size_text
from shoal.report.formats import format_byte_change, format_bytes
from shoal.report.size_comparison import Comparison, compare_sizes, layer_title

_CHUNK = 1024 * 1024  # bytes
_MAX_ROWS = 10  # of a table on the terminal
_PAUSE = 10.0  # seconds between two lines about the progress
_NUMBER_WIDTH = 13  # of a column of numbers, in letters


@dataclass(frozen=True)
class _ImageArchive:
    """An image as a tar archive of about `size` bytes, which is read in chunks."""

    name: str
    size: int
    chunks: Iterator[bytes]
    is_of_docker: bool = False
    """Whether Docker makes it now, and not anybody before."""


def write_size_report(
    names: Sequence[str], matrix: BuildSpec | None, output: Path, as_json: bool, console: Console
) -> tuple[list[Inventory], list[Path]]:
    """Write the page of one image or two, and with `as_json` their inventories next to it.

    Args:
        names: Frameworks, tags or .tar files: one, or two to compare.
        matrix: The matrix, which defines the frameworks; None if there is none.
        output: The page to write.
        as_json: Whether to write the inventories.
        console: The console for progress.

    Returns:
        The inventories, and the files that were written.

    Raises:
        UsageError: If there is no such image, or a file cannot be written. Both are checked first.
        ImageError: If an archive is not an image.
        DiskError, DockerError: As their names say.
    """
    page, *others = output_files.choose_files(output, as_json, [Path(name) for name in names])
    archives = [_open_image(name, matrix) for name in names]
    known: Blobs = {}
    inventories = [_read_inventory(archive, console, known) for archive in archives]
    comparison = compare_sizes(*inventories) if len(inventories) == 2 else None
    texts = {page: size_page.render_size_page(inventories, comparison)}
    texts |= {other: size_document.format_document(inventories, comparison) for other in others}
    output_files.write_files(output, texts)
    return inventories, list(texts)


def print_size_report(console: Console, inventories: Sequence[Inventory]) -> None:
    """Print the size of an image with its largest layers and packages, or how two images differ."""
    if len(inventories) == 2:
        comparison = compare_sizes(*inventories)
        _print_sentences(console, (sentence for of in inventories for sentence in size_text.summarize_size(of)))
        _print_sentences(console, size_text.summarize_comparison(comparison))
        _print_changes(console, comparison)
        return
    for of in inventories:
        _print_sentences(console, size_text.summarize_size(of))
        layers = sorted(of.layers, key=lambda layer: -layer.sum.bytes)
        _print_sizes(console, "layer", [(layer_title(layer), layer.sum) for layer in layers])
        _print_sizes(console, "package", [(owner.name, sums) for owner, sums in of.owners.items()])


def _open_image(name: str, matrix: BuildSpec | None) -> _ImageArchive:
    """Return an image as an archive: a .tar file, the default image of a framework, or any other that Docker has.

    Docker's archive is read while it is made. Raises `UsageError` if there is no such image or file.
    """
    file = Path(name)
    if file.suffix == ".tar":
        try:
            return _ImageArchive(name, file.stat().st_size, _read_chunks(file.open("rb")))
        except OSError as error:
            raise UsageError(
                f"{name}: cannot be read: {error.strerror}. Fix: write one with docker save -o {name} TAG"
            ) from error
    tag = matrix.defaults.get(name, name) if matrix else name
    client = docker_client.connect()
    image = find_image(client, tag)
    if image is None:
        raise UsageError(describe_missing(client, tag, matrix))
    return _ImageArchive(tag, int(image.attrs["Size"]), _save_image(client, str(image.id)), is_of_docker=True)


def _read_chunks(file: IO[bytes]) -> Iterator[bytes]:
    """Yield a file in chunks, and close it at the end."""
    with file:
        while chunk := file.read(_CHUNK):
            yield chunk


def _save_image(client: docker.DockerClient, image_id: str) -> Iterator[bytes]:
    """Yield an image as an archive. By its ID, because several images may have had the tag."""
    yield from client.api.get_image(image_id, chunk_size=_CHUNK)


def _read_inventory(archive: _ImageArchive, console: Console, known: Blobs) -> Inventory:
    """Read and compress the layers of an image for its inventory. Shows a bar, or lines without a terminal.

    Layers of Docker's other images are in `known`, and are not read again.
    """
    blobs = known if archive.is_of_docker else None
    columns = (
        SpinnerColumn(),
        TextColumn("reading and compressing {task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
    )
    if not console.is_terminal or console.is_dumb_terminal:
        print_line(f"reading and compressing {archive.name}, {format_bytes(archive.size)}", console)
        return inventory.read_inventory(archive.name, _report_chunks(archive, console), blobs)
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(archive.name, total=archive.size)
        return inventory.read_inventory(archive.name, _count_chunks(archive.chunks, progress, task), blobs)


def _report_chunks(archive: _ImageArchive, console: Console) -> Iterator[bytes]:
    """Yield the chunks, and print a line every `_PAUSE` seconds."""
    done, printed = 0, time.monotonic()
    for chunk in archive.chunks:
        yield chunk
        done += len(chunk)
        if time.monotonic() >= printed + _PAUSE:
            printed = time.monotonic()
            text = f"{archive.name}: {format_bytes(done)} of {format_bytes(archive.size)}"
            print_line(text, console)


def _count_chunks(chunks: Iterable[bytes], progress: Progress, task: TaskID) -> Iterator[bytes]:
    """Yield the chunks, and advance a progress bar by their sizes."""
    for chunk in chunks:
        yield chunk
        progress.advance(task, len(chunk))


def _print_sentences(console: Console, sentences: Iterable[str]) -> None:
    for sentence in sentences:
        print_line(sentence, console)


def _print_sizes(console: Console, name: str, rows: Sequence[tuple[str, Sum]]) -> None:
    """Print a table of the first ten rows, and how many are left out."""
    table = _make_table(console, name, "size", "compressed", "hidden")
    for text, of in rows[:_MAX_ROWS]:
        table.add_row(escape(text), format_bytes(of.bytes), format_bytes(of.compressed), format_bytes(of.hidden))
    console.print(table)
    if len(rows) > _MAX_ROWS:
        print_line(f"  and {len(rows) - _MAX_ROWS} smaller", console)


def _print_changes(console: Console, comparison: Comparison) -> None:
    """Print the ten largest changes of layers and of packages, each as a table.

    Then it prints how many are left out. Without changes there is no table.
    """
    for name, changes in (("layer", comparison.layers), ("package", comparison.packages)):
        shown_changes = sorted(filter(lambda change: change.is_changed, changes), key=lambda change: -abs(change.bytes))
        table = _make_table(console, name, "state", "change", "compressed")
        for change in shown_changes[:_MAX_ROWS]:
            text = escape(f"{change.name} {change.version}".strip())
            table.add_row(text, change.state, format_byte_change(change.bytes), format_byte_change(change.compressed))
        if shown_changes:
            console.print(table)
        if len(shown_changes) > _MAX_ROWS:
            print_line(f"  and {len(shown_changes) - _MAX_ROWS} smaller changes", console)


def _make_table(console: Console, name: str, *others: str) -> Table:
    """Return a table; on a narrow terminal its first column is cut off, as the others are numbers."""
    table = Table(box=None)
    width = max(20, console.width - _NUMBER_WIDTH * len(others))
    table.add_column(name, no_wrap=True, overflow="ellipsis", max_width=width)
    for other in others:
        table.add_column(other, justify="right", no_wrap=True)
    return table
