"""Renders the page of image sizes: one self-contained HTML file with a treemap, from size.html.j2."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shoal.layers.inventory import Inventory, Layer, Sum, total
from shoal.layers.owners import Owner
from shoal.report import size_text
from shoal.report.formats import format_byte_change, format_bytes, format_count, format_share
from shoal.report.output_files import render_page
from shoal.report.size_comparison import Comparison, layer_title
from shoal.report.treemap import Box, squarify

_CANVAS = Box(0, 0, 1440, 620)  # about its size on the page in pixels, so that squares look square
_SMALLEST = 0.0004  # of the image; smaller packages share a rectangle
_MAX_ROWS = 40  # of a table; further rows are folded away
_LETTER, _LINE = 7.0, 20.0  # the size of text in pixels
_MAX_NAMES = 2  # packages that the row of a layer names


@dataclass(frozen=True)
class Cell:
    """A rectangle of the treemap. Its box, and the share of it that is hidden, are in percent."""

    kind: str
    box: Box
    title: str
    label: str
    size: str
    hidden: float


@dataclass(frozen=True)
class BarPart:
    """A part of a bar, in percent of the longest bar. `kind` is its CSS class."""

    kind: str
    width: float
    title: str


@dataclass(frozen=True)
class Row:
    """A row of a table of sizes, with a bar for its size and the length of a bar for its compressed size."""

    name: str
    details: str
    sizes: Sum
    parts: tuple[BarPart, ...]
    compressed: float


@dataclass(frozen=True)
class ImageView:
    """An image on the page."""

    name: str
    summary: tuple[str, ...]
    layers: tuple[Row, ...]
    cells: tuple[Cell, ...]
    packages: tuple[Row, ...]
    kinds: tuple[tuple[str, str, Sum], ...]
    """Each kind's CSS class, name and size."""


def render_size_page(inventories: Sequence[Inventory], comparison: Comparison | None = None) -> str:
    """Return the page as HTML, for one image, or for two and how they differ."""
    changes = [change for change in comparison.packages if change.is_changed] if comparison else []
    layer_changes = comparison.layers if comparison else ()
    return render_page(
        "size.html.j2",
        images=[_view_image(inventory) for inventory in inventories],
        comparison=comparison,
        comparison_summary=list(size_text.summarize_comparison(comparison)) if comparison else [],
        changes=changes,
        layer_changes=layer_changes,
        largest_change=max((abs(change.bytes) for change in (*changes, *layer_changes)), default=0) or 1,
        format_bytes=format_bytes,
        format_byte_change=format_byte_change,
        format_share=format_share,
        kinds=size_text.KINDS,
        max_rows=_MAX_ROWS,
        aspect=f"{_CANVAS.width:.0f} / {_CANVAS.height:.0f}",
    )


def _view_image(inventory: Inventory) -> ImageView:
    """Return an inventory as the page shows it: rows of layers and packages, and the treemap."""
    owners = inventory.owners
    by_kind = {kind: total(of for owner, of in owners.items() if owner.kind == kind) for kind in size_text.KINDS}
    versions = inventory.versions
    longest_layer = max((layer.sum.bytes for layer in inventory.layers), default=0)
    longest = max((of.bytes for of in owners.values()), default=0)
    return ImageView(
        name=inventory.name,
        summary=tuple(size_text.summarize_size(inventory)),
        layers=tuple(_make_layer_row(number, layer, longest_layer) for number, layer in enumerate(inventory.layers, 1)),
        cells=tuple(_make_cells(owners, by_kind)),
        packages=tuple(
            Row(
                owner.name,
                versions.get(owner, ""),
                of,
                (_make_part(owner.kind, of, longest),),
                _percent(of.compressed, longest),
            )
            for owner, of in owners.items()
        ),
        kinds=tuple((kind, name, by_kind[kind]) for kind, name in size_text.KINDS.items() if by_kind[kind].bytes),
    )


def _make_layer_row(number: int, layer: Layer, longest: int) -> Row:
    """Return the row of a layer, with a bar that shows its kinds of files and its hidden files."""
    kinds = {kind: total(of for owner, of in layer.owners.items() if owner.kind == kind) for kind in size_text.KINDS}
    shown = {kind: Sum(of.bytes - of.hidden, of.compressed) for kind, of in kinds.items()}
    hidden = Sum(layer.sum.hidden, layer.sum.hidden_compressed)
    parts = tuple(_make_part(kind, of, longest) for kind, of in {**shown, "hidden": hidden}.items() if of.bytes)
    return Row(f"{number}", _describe_layer(layer), layer.sum, parts, _percent(layer.sum.compressed, longest))


def _describe_layer(layer: Layer) -> str:
    """Return the two largest packages of a layer, and its command. Commands alone look similar."""
    packages = [(owner.name, of.bytes) for owner, of in layer.owners.items() if owner.kind in ("python", "debian")]
    names = [name for name, _ in sorted(packages, key=lambda item: -item[1])[:_MAX_NAMES]]
    return " · ".join([*([", ".join(names)] if names else []), layer_title(layer)])


def _make_part(kind: str, of: Sum, longest: int) -> BarPart:
    name = size_text.KINDS.get(kind, "hidden by a later layer")
    return BarPart(kind, _percent(of.bytes, longest), f"{name}: {format_bytes(of.bytes)}")


def _percent(part: float, whole: float) -> float:
    return round(100 * part / whole, 3) if whole else 0.0


def _make_cells(owners: dict[Owner, Sum], by_kind: dict[str, Sum]) -> Iterator[Cell]:
    """Yield the rectangles of the treemap. Rectangles of one kind are next to each other; small owners share one."""
    kinds = sorted((kind for kind, of in by_kind.items() if of.bytes), key=lambda kind: -by_kind[kind].bytes)
    smallest = sum(of.bytes for of in by_kind.values()) * _SMALLEST
    for kind, box in zip(kinds, squarify([by_kind[kind].bytes for kind in kinds], _CANVAS), strict=True):
        items = _gather_small(
            [(owner.name, of) for owner, of in owners.items() if owner.kind == kind and of.bytes], smallest
        )
        for (name, of), inner in zip(items, squarify([of.bytes for _, of in items], box), strict=True):
            yield _make_cell(kind, name, of, inner)


def _gather_small(items: list[tuple[str, Sum]], smallest: float) -> list[tuple[str, Sum]]:
    """Replace the items smaller than `smallest` bytes by one item, and sort by size in descending order."""
    large = [item for item in items if item[1].bytes >= smallest]
    small = [of for _, of in items if of.bytes < smallest]
    if small:
        large.append((f"{format_count(len(small), 'smaller one')}", total(small)))
    return sorted(large, key=lambda item: -item[1].bytes)


def _make_cell(kind: str, name: str, of: Sum, box: Box) -> Cell:
    """Return a rectangle of the treemap. Its label is empty if it does not fit."""
    percent = Box(
        _percent(box.x, _CANVAS.width),
        _percent(box.y, _CANVAS.height),
        _percent(box.width, _CANVAS.width),
        _percent(box.height, _CANVAS.height),
    )
    sizes = f"{format_bytes(of.bytes)}, {format_bytes(of.compressed)} compressed"
    hidden = f"\n{format_bytes(of.hidden)} hidden by a later layer" if of.hidden else ""
    fits = box.width >= min(len(name), 6) * _LETTER and box.height >= _LINE
    return Cell(
        kind=kind,
        box=percent,
        title=f"{name}\n{size_text.KINDS[kind]}\n{sizes}{hidden}",
        label=name if fits else "",
        size=format_bytes(of.bytes) if fits else "",
        hidden=_percent(of.hidden, of.bytes),
    )
