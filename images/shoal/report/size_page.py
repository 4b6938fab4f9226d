"""The page of images' sizes: one HTML file that needs no other, from size.html.j2. The treemap is laid out here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jinja2

from shoal.layers.inventory import Inventory, Layer, Sum, total
from shoal.layers.owners import Owner
from shoal.report import size_text, timeline_text
from shoal.report.size_comparison import Change, Comparison, title
from shoal.report.treemap import Box, squarified

_CANVAS = Box(0, 0, 1440, 620)  # about the pixels that it gets: squares are to be square there
_LEAST = 0.0004  # of the image: what is smaller shares a rectangle
_MOST_ROWS = 40  # of a table before the rest is folded away
_LETTER, _LINE = 7.0, 20.0  # pixels; the style sheet hides what the window has no room for
_NAMED = 2  # packages of a layer that its line names


@dataclass(frozen=True)
class Cell:
    """A rectangle of the treemap, in percent of the picture; `hidden` is the part of it that no container sees."""

    kind: str
    box: Box
    title: str
    label: str
    size: str
    hidden: float


@dataclass(frozen=True)
class Part:
    """A stretch of a bar, in percent of its length; `kind` is its class in the style sheet."""

    kind: str
    width: float
    title: str


@dataclass(frozen=True)
class Row:
    """A line of a table of sizes: the bar of its uncompressed bytes, and how long that of its compressed ones is."""

    name: str
    what: str
    of: Sum
    parts: tuple[Part, ...]
    compressed: float


@dataclass(frozen=True)
class Image:
    """An image as it is drawn."""

    name: str
    headline: tuple[str, ...]
    layers: tuple[Row, ...]
    cells: tuple[Cell, ...]
    packages: tuple[Row, ...]
    kinds: tuple[tuple[str, str, Sum], ...]
    """Their class, their name and their bytes."""


def render(inventories: Sequence[Inventory], comparison: Comparison | None = None) -> str:
    """Return the page of images, and of how two of them differ."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("shoal.report", "."),
        undefined=jinja2.StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    told = [change for change in comparison.packages if change.is_told] if comparison else []
    return environment.get_template("size.html.j2").render(
        images=[_image(inventory) for inventory in inventories],
        comparison=comparison,
        verdict=list(size_text.verdict(comparison)) if comparison else [],
        changes=told,
        layer_changes=comparison.layers if comparison else (),
        length=_length_of_changes([*told, *(comparison.layers if comparison else ())]),
        amount=timeline_text.amount,
        signed=size_text.signed,
        share=size_text.share,
        kinds=size_text.KINDS,
        most_rows=_MOST_ROWS,
        aspect=f"{_CANVAS.width:.0f} / {_CANVAS.height:.0f}",
    )


def _image(inventory: Inventory) -> Image:
    owners = inventory.owners
    by_kind = {kind: total(of for owner, of in owners.items() if owner.kind == kind) for kind in size_text.KINDS}
    versions = inventory.versions
    longest_layer = max((layer.sum.bytes for layer in inventory.layers), default=0)
    longest = max((of.bytes for of in owners.values()), default=0)
    return Image(
        name=inventory.name,
        headline=tuple(size_text.headline(inventory)),
        layers=tuple(_layer(number, layer, longest_layer) for number, layer in enumerate(inventory.layers, 1)),
        cells=tuple(_cells(owners, by_kind)),
        packages=tuple(
            Row(
                owner.name,
                versions.get(owner, ""),
                of,
                (_part(owner.kind, of, longest),),
                _percent(of.compressed, longest),
            )
            for owner, of in owners.items()
        ),
        kinds=tuple((kind, name, by_kind[kind]) for kind, name in size_text.KINDS.items() if by_kind[kind].bytes),
    )


def _layer(number: int, layer: Layer, longest: int) -> Row:
    kinds = {kind: total(of for owner, of in layer.owners.items() if owner.kind == kind) for kind in size_text.KINDS}
    shown = {kind: Sum(of.bytes - of.hidden, of.compressed) for kind, of in kinds.items()}
    hidden = Sum(layer.sum.hidden, layer.sum.hidden_compressed)
    parts = tuple(_part(kind, of, longest) for kind, of in {**shown, "hidden": hidden}.items() if of.bytes)
    return Row(f"{number}", _named(layer), layer.sum, parts, _percent(layer.sum.compressed, longest))


def _named(layer: Layer) -> str:
    """Return what a layer brings most of, and what made it: commands begin alike, and a narrow column cuts the rest."""
    packages = [(owner.name, of.bytes) for owner, of in layer.owners.items() if owner.kind in ("python", "debian")]
    names = [name for name, _ in sorted(packages, key=lambda item: -item[1])[:_NAMED]]
    return " · ".join([*([", ".join(names)] if names else []), title(layer)])


def _part(kind: str, of: Sum, longest: int) -> Part:
    name = size_text.KINDS.get(kind, "hidden by a later layer")
    return Part(kind, _percent(of.bytes, longest), f"{name}: {timeline_text.amount(of.bytes)}")


def _percent(part: float, whole: float) -> float:
    return round(100 * part / whole, 3) if whole else 0.0


def _cells(owners: dict[Owner, Sum], by_kind: dict[str, Sum]) -> Iterator[Cell]:
    """Yield the rectangles: those of a kind lie together."""
    kinds = sorted((kind for kind, of in by_kind.items() if of.bytes), key=lambda kind: -by_kind[kind].bytes)
    least = sum(of.bytes for of in by_kind.values()) * _LEAST
    for kind, box in zip(kinds, squarified([by_kind[kind].bytes for kind in kinds], _CANVAS), strict=True):
        items = _gathered([(owner.name, of) for owner, of in owners.items() if owner.kind == kind and of.bytes], least)
        for (name, of), inner in zip(items, squarified([of.bytes for _, of in items], box), strict=True):
            yield _cell(kind, name, of, inner)


def _gathered(items: list[tuple[str, Sum]], least: float) -> list[tuple[str, Sum]]:
    """Put what is too small to be seen into one; the largest stays first."""
    large = [item for item in items if item[1].bytes >= least]
    small = [of for _, of in items if of.bytes < least]
    if small:
        large.append((f"{timeline_text.counted(len(small), 'smaller one')}", total(small)))
    return sorted(large, key=lambda item: -item[1].bytes)


def _cell(kind: str, name: str, of: Sum, box: Box) -> Cell:
    percent = Box(
        _percent(box.x, _CANVAS.width),
        _percent(box.y, _CANVAS.height),
        _percent(box.width, _CANVAS.width),
        _percent(box.height, _CANVAS.height),
    )
    sizes = f"{timeline_text.amount(of.bytes)}, {timeline_text.amount(of.compressed)} compressed"
    hidden = f"\n{timeline_text.amount(of.hidden)} hidden by a later layer" if of.hidden else ""
    fits = box.width >= min(len(name), 6) * _LETTER and box.height >= _LINE
    return Cell(
        kind=kind,
        box=percent,
        title=f"{name}\n{size_text.KINDS[kind]}\n{sizes}{hidden}",
        label=name if fits else "",
        size=timeline_text.amount(of.bytes) if fits else "",
        hidden=_percent(of.hidden, of.bytes),
    )


def _length_of_changes(changes: Sequence[Change]) -> int:
    """Return the largest change: half of a bar's length."""
    return max((abs(change.bytes) for change in changes), default=0) or 1
