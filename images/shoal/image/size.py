"""`shoal size`: reads one or two images, and prints their largest layers and packages, or how they differ."""

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
from shoal.console import print_line, print_lines
from shoal.docker_client.images import describe_missing, find_image
from shoal.errors import UsageError
from shoal.formats import format_byte_change, format_bytes, format_count, format_share
from shoal.image import inventory
from shoal.image.archive import Blobs
from shoal.image.inventory import Change, Comparison, Inventory, Layer, Sum, compare_sizes, layer_title
from shoal.matrix.spec import BuildSpec

_CHUNK = 1024 * 1024  # bytes
_MAX_ROWS = 10  # of a table on the terminal
_PAUSE = 10.0  # seconds between two lines about the progress
_NUMBER_WIDTH = 13  # of a column of numbers, in letters
_MAX_NAMES = 2  # packages that the row of a layer names


@dataclass(frozen=True)
class _ImageArchive:
    """An image as a tar archive of about `size` bytes, which is read in chunks."""

    name: str
    size: int
    chunks: Iterator[bytes]
    is_of_docker: bool = False
    """Whether Docker makes it now, and not anybody before."""


def read_inventories(names: Sequence[str], matrix: BuildSpec | None, console: Console) -> list[Inventory]:
    """Returns the inventories of images, after it has found all of them.

    Args:
        names: Frameworks, tags or .tar files.
        matrix: The matrix, which defines the frameworks; None if there is none.
        console: The console for progress.

    Raises:
        UsageError: If there is no such image or file.
        ImageError: If an archive is not an image.
        DiskError, DockerError: As their names say.
    """
    archives = [_open_image(name, matrix) for name in names]
    known: Blobs = {}
    return [_read_inventory(archive, console, known) for archive in archives]


def print_sizes(console: Console, inventories: Sequence[Inventory]) -> None:
    """Prints the size of an image with its largest layers and packages, or how two images differ."""
    for of in inventories:
        print_lines(summarize_size(of), console)
    if len(inventories) == 2:
        comparison = compare_sizes(*inventories)
        print_lines(summarize_comparison(comparison), console)
        _print_changes(console, comparison)
        return
    for of in inventories:
        layers = sorted(of.layers, key=lambda layer: -layer.sum.bytes)
        _print_rows(console, "layer", [(_describe_layer(layer), layer.sum) for layer in layers])
        _print_rows(console, "package", [(owner.name, sums) for owner, sums in of.owners.items()])


def summarize_size(of: Inventory) -> Iterator[str]:
    """Yields sentences on an image's size: bytes, layers, packages, the largest, and bytes wasted by later layers."""
    sizes = of.sum
    layers = format_count(len(of.layers), "layer")
    yield f"{of.name}: {format_bytes(sizes.bytes)} in {layers}, {format_bytes(sizes.compressed)} compressed."
    named = [(owner.name, sums) for owner, sums in of.owners.items() if owner.kind != "tar"]
    largest = ", ".join(f"{name} {format_bytes(sums.bytes)}" for name, sums in named[:3])
    yield (
        f"{format_count(len(of.python), 'Python distribution')}, "
        f"{format_count(len(of.debian), 'Debian package')}; largest: {largest or 'none'}."
    )
    if sizes.hidden:
        yield (
            f"{format_bytes(sizes.hidden)} ({format_share(sizes.hidden, sizes.bytes)}) is wasted, "
            f"{format_bytes(sizes.hidden_compressed)} compressed: it is deleted or replaced by later layers."
        )
    else:
        yield "Nothing is wasted: no layer deletes or replaces files of another."


def summarize_comparison(comparison: Comparison) -> Iterator[str]:
    """Yields the sentences that summarize how the sizes of two images differ."""
    total = comparison.total
    before = total.before or Sum()
    if not total.bytes:
        yield f"{comparison.after.name} and {comparison.before.name} have the same size."
    else:
        word = "larger" if total.bytes > 0 else "smaller"
        share = format_share(abs(total.bytes), before.bytes)
        yield (
            f"{comparison.after.name} is {format_bytes(abs(total.bytes))} ({share}) {word} than"
            f" {comparison.before.name}; compressed: {format_byte_change(total.compressed)}."
        )
    yield f"Packages and directories: {_count_states(comparison.packages)}. Layers: {_count_states(comparison.layers)}."


def _count_states(changes: tuple[Change, ...]) -> str:
    """Returns how many changes have each state, such as "2 new, 1 gone"; "none" without changes."""
    found = [change.state for change in changes]
    counts = [f"{found.count(state)} {state}" for state in ("new", "gone", "grown", "shrunk", "same") if state in found]
    return ", ".join(counts) or "none"


def _describe_layer(layer: Layer) -> str:
    """Returns the two largest packages of a layer, and its command. Commands alone look similar."""
    packages = [(owner.name, of.bytes) for owner, of in layer.owners.items() if owner.kind in ("python", "debian")]
    names = [name for name, _ in sorted(packages, key=lambda item: -item[1])[:_MAX_NAMES]]
    return " · ".join([*([", ".join(names)] if names else []), layer_title(layer)])


def _open_image(name: str, matrix: BuildSpec | None) -> _ImageArchive:
    """Opens a .tar file or an image that Docker has. Docker's archive is read while it is made."""
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
    with file:
        while chunk := file.read(_CHUNK):
            yield chunk


def _save_image(client: docker.DockerClient, image_id: str) -> Iterator[bytes]:
    """Yields an image as an archive. By its ID, because several images may have had the tag."""
    yield from client.api.get_image(image_id, chunk_size=_CHUNK)


def _read_inventory(archive: _ImageArchive, console: Console, known: Blobs) -> Inventory:
    """Shows a bar, or lines without a terminal. Layers in `known`, of Docker's other images, are not read again."""
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
    done, printed = 0, time.monotonic()
    for chunk in archive.chunks:
        yield chunk
        done += len(chunk)
        if time.monotonic() >= printed + _PAUSE:
            printed = time.monotonic()
            text = f"{archive.name}: {format_bytes(done)} of {format_bytes(archive.size)}"
            print_line(text, console)


def _count_chunks(chunks: Iterable[bytes], progress: Progress, task: TaskID) -> Iterator[bytes]:
    for chunk in chunks:
        yield chunk
        progress.advance(task, len(chunk))


def _print_rows(console: Console, name: str, rows: Sequence[tuple[str, Sum]]) -> None:
    table = _make_table(console, name, "size", "compressed", "hidden")
    for text, of in rows[:_MAX_ROWS]:
        table.add_row(escape(text), format_bytes(of.bytes), format_bytes(of.compressed), format_bytes(of.hidden))
    console.print(table)
    if len(rows) > _MAX_ROWS:
        print_line(f"  and {len(rows) - _MAX_ROWS} smaller, which --json lists", console)


def _print_changes(console: Console, comparison: Comparison) -> None:
    for name, changes in (("layer", comparison.layers), ("package", comparison.packages)):
        shown_changes = sorted(filter(lambda change: change.is_changed, changes), key=lambda change: -abs(change.bytes))
        table = _make_table(console, name, "state", "change", "compressed")
        for change in shown_changes[:_MAX_ROWS]:
            text = escape(f"{change.name} {change.version}".strip())
            table.add_row(text, change.state, format_byte_change(change.bytes), format_byte_change(change.compressed))
        if shown_changes:
            console.print(table)
        if len(shown_changes) > _MAX_ROWS:
            print_line(f"  and {len(shown_changes) - _MAX_ROWS} smaller changes, which --json lists", console)


def _make_table(console: Console, name: str, *others: str) -> Table:
    """Returns a table; on a narrow terminal its first column is cut off, as the others are numbers."""
    table = Table(box=None)
    width = max(20, console.width - _NUMBER_WIDTH * len(others))
    table.add_column(name, no_wrap=True, overflow="ellipsis", max_width=width)
    for other in others:
        table.add_column(other, justify="right", no_wrap=True)
    return table
