"""`shoal report size`: one or two images in, a page, their inventories as JSON and a few lines on the terminal out."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import docker
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from shoal import docker_client
from shoal.docker_client.containers import strip_controls
from shoal.docker_client.images import describe_missing, find_image
from shoal.errors import UsageError
from shoal.layers import inventory
from shoal.layers.inventory import Inventory, Sum
from shoal.matrix.spec import BuildSpec
from shoal.report import output_files, size_page, size_text
from shoal.report.size_comparison import Change, Comparison, compare, title
from shoal.report.timeline_text import amount

_READ = 1024 * 1024  # bytes at once
_BRIEF = 10  # rows of a table on the terminal
_FIGURES = 13  # letters of a column of figures


@dataclass(frozen=True)
class _Archive:
    """An image that is there, and comes in `chunks`, about `size` bytes of them."""

    name: str
    size: int
    chunks: Iterator[bytes]


def report(
    words: Sequence[str], matrix: BuildSpec | None, output: Path, as_json: bool, console: Console
) -> tuple[list[Inventory], list[Path]]:
    """Write the page of one image or two, and with `as_json` their inventories beside it; return both.

    Raises `UsageError` for an image that is not there and for a file that cannot be written, both before the long
    reading, and `ImageError` for an archive that is no image.
    """
    page, *others = output_files.targets(output, as_json, [Path(word) for word in words])
    archives = [_find(word, matrix) for word in words]
    inventories = [_inventory(archive, console) for archive in archives]
    comparison = compare(*inventories) if len(inventories) == 2 else None
    texts = {page: size_page.render(inventories, comparison)}
    for beside in others:
        texts[beside] = json.dumps(document(inventories, comparison), indent=2) + "\n"
    output_files.write(output, texts)
    return inventories, list(texts)


def show(console: Console, inventories: Sequence[Inventory]) -> None:
    """Print how large the images are, what in them, and how they differ."""
    if len(inventories) == 2:
        comparison = compare(*inventories)
        _say(console, (sentence for of in inventories for sentence in size_text.headline(of)))
        _say(console, size_text.verdict(comparison))
        _show_changes(console, comparison)
        return
    for of in inventories:
        _say(console, size_text.headline(of))
        layers = sorted(of.layers, key=lambda layer: -layer.sum.bytes)
        _table(console, "layer", [(title(layer), layer.sum) for layer in layers])
        _table(console, "package", [(owner.name, sums) for owner, sums in of.owners.items()])


def document(inventories: Sequence[Inventory], comparison: Comparison | None) -> dict[str, Any]:
    """Return what is known of the images as a JSON object; sizes are in bytes."""
    found: dict[str, Any] = {"images": [_image(of) for of in inventories]}
    if comparison:
        found["difference"] = {
            "packages": [_change(change) for change in comparison.packages if change.is_told],
            "layers": [_change(change) for change in comparison.layers],
            **_change(comparison.whole),
        }
    return found


def _image(of: Inventory) -> dict[str, Any]:
    return {
        "name": of.name,
        **asdict(of.sum),
        "layers": [
            {
                "digest": layer.digest,
                "command": layer.command,
                **asdict(layer.sum),
                "owners": [{**asdict(owner), **asdict(sums)} for owner, sums in layer.owners.items()],
            }
            for layer in of.layers
        ],
        "owners": [
            {**asdict(owner), "version": of.versions.get(owner, ""), **asdict(sums)}
            for owner, sums in of.owners.items()
        ],
        "debian_packages": [asdict(package) for package in of.debian],
        "python_distributions": [asdict(distribution) for distribution in of.python],
    }


def _change(change: Change) -> dict[str, Any]:
    return {
        "kind": change.kind,
        "name": change.name,
        "state": change.state,
        "version": change.version,
        "bytes": change.bytes,
        "compressed": change.compressed,
    }


def _find(word: str, matrix: BuildSpec | None) -> _Archive:
    """Return the archive of what a word means: a file, an image of buildspec.yml, or any of the engine's."""
    file = Path(word)
    if file.suffix == ".tar":
        try:
            return _Archive(word, file.stat().st_size, _pieces(file.open("rb")))
        except OSError as error:
            raise UsageError(
                f"{word}: cannot be read: {error.strerror}. Write one: docker save -o {word} TAG"
            ) from error
    tag = matrix.defaults.get(word, word) if matrix else word
    client = docker_client.connect()
    image = find_image(client, tag)
    if image is None:
        raise UsageError(describe_missing(client, tag, matrix))
    return _Archive(tag, int(image.attrs["Size"]), _saved(client, str(image.id)))


def _pieces(file: IO[bytes]) -> Iterator[bytes]:
    with file:
        while piece := file.read(_READ):
            yield piece


def _saved(client: docker.DockerClient, image_id: str) -> Iterator[bytes]:
    """Ask the engine for an image when the first piece is wanted; by its ID, as a name may have several images."""
    yield from client.api.get_image(image_id, chunk_size=_READ)


def _inventory(archive: _Archive, console: Console) -> Inventory:
    """Return the inventory, and show how far it is."""
    columns = (
        SpinnerColumn(),
        TextColumn("reading and compressing {task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
    )
    off = not console.is_terminal or console.is_dumb_terminal
    if off:
        console.print(f"reading and compressing {archive.name}, {amount(archive.size)}", markup=False, soft_wrap=True)
    with Progress(*columns, console=console, disable=off, transient=True) as progress:
        task = progress.add_task(archive.name, total=archive.size)
        return inventory.read_inventory(archive.name, _counted(archive.chunks, progress, task))


def _counted(chunks: Iterable[bytes], progress: Progress, task: TaskID) -> Iterator[bytes]:
    for chunk in chunks:
        yield chunk
        progress.advance(task, len(chunk))


def _say(console: Console, sentences: Iterable[str]) -> None:
    for sentence in sentences:
        console.print(strip_controls(sentence), markup=False, soft_wrap=True)


def _table(console: Console, name: str, rows: Sequence[tuple[str, Sum]]) -> None:
    table = _columns(console, name, "size", "compressed", "hidden")
    for text, of in rows[:_BRIEF]:
        table.add_row(escape(strip_controls(text)), amount(of.bytes), amount(of.compressed), amount(of.hidden))
    console.print(table)
    if len(rows) > _BRIEF:
        console.print(f"  and {len(rows) - _BRIEF} smaller", markup=False)


def _show_changes(console: Console, comparison: Comparison) -> None:
    for name, changes in (("layer", comparison.layers), ("package", comparison.packages)):
        told = sorted(filter(lambda change: change.is_told, changes), key=lambda change: -abs(change.bytes))
        table = _columns(console, name, "state", "change", "compressed")
        for change in told[:_BRIEF]:
            text = escape(strip_controls(f"{change.name} {change.version}".strip()))
            table.add_row(text, change.state, size_text.signed(change.bytes), size_text.signed(change.compressed))
        if told:
            console.print(table)
        if len(told) > _BRIEF:
            console.print(f"  and {len(told) - _BRIEF} smaller changes", markup=False)


def _columns(console: Console, name: str, *others: str) -> Table:
    """Return a table whose first column gives way on a narrow terminal, as its others are figures."""
    table = Table(box=None)
    width = max(20, console.width - _FIGURES * len(others))
    table.add_column(name, no_wrap=True, overflow="ellipsis", max_width=width)
    for other in others:
        table.add_column(other, justify="right", no_wrap=True)
    return table
