"""Lays out a treemap: rectangles of given areas that are close to squares.

The method is "Squarified Treemaps" by Bruls, Huizing and van Wijk (2000). The package `squarify` is not used: it
exceeds Python's recursion limit for one large value with many small ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Box:
    """A rectangle; x grows to the right and y downwards."""

    x: float
    y: float
    width: float
    height: float

    @property
    def area(self) -> float:
        return self.width * self.height


def squarify(values: Sequence[float], box: Box) -> list[Box]:
    """Return a rectangle in `box` for each value, in their order. Values are positive, in descending order."""
    scale = box.area / (sum(values) or 1)
    rest = [value * scale for value in values]
    boxes: list[Box] = []
    while rest:
        count = _row_length(rest, min(box.width, box.height))
        row, rest = rest[:count], rest[count:]
        boxes += _place_row(row, box)
        box = _remaining_box(box, sum(row))
    return boxes


def _row_length(areas: Sequence[float], side: float) -> int:
    """Return how many of the areas to put into the next row along `side`, so that they are closest to squares."""
    count = 1
    while count < len(areas) and _worst_ratio(areas[: count + 1], side) <= _worst_ratio(areas[:count], side):
        count += 1
    return count


def _worst_ratio(row: Sequence[float], side: float) -> float:
    """Return the largest aspect ratio of the rectangles of a row."""
    square = (sum(row) / side) ** 2 if side else 0
    return max(max(area / square, square / area) for area in row) if square else 0


def _place_row(row: Sequence[float], box: Box) -> Iterator[Box]:
    """Yield the rectangles of a row, along the shorter side of the box."""
    thickness = sum(row) / (min(box.width, box.height) or 1)
    along = 0.0
    for area in row:
        length = area / (thickness or 1)
        if box.width >= box.height:
            yield Box(box.x, box.y + along, thickness, length)
        else:
            yield Box(box.x + along, box.y, length, thickness)
        along += length


def _remaining_box(box: Box, used: float) -> Box:
    """Return what is left of a box after a row of the area `used`."""
    if box.width >= box.height:
        thickness = used / (box.height or 1)
        return Box(box.x + thickness, box.y, max(0.0, box.width - thickness), box.height)
    thickness = used / (box.width or 1)
    return Box(box.x, box.y + thickness, box.width, max(0.0, box.height - thickness))
