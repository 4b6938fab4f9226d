"""A treemap: rectangles of given areas, as square as it goes.

The method is that of Bruls, Huizing and van Wijk, "Squarified Treemaps" (2000).
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


def squarified(values: Sequence[float], box: Box) -> list[Box]:
    """Return a rectangle in `box` for each value, in their order; all are above 0 and the largest comes first."""
    scale = box.area / (sum(values) or 1)
    rest = [value * scale for value in values]
    boxes: list[Box] = []
    while rest:
        count = _row_length(rest, min(box.width, box.height))
        row, rest = rest[:count], rest[count:]
        boxes += _row(row, box)
        box = _beside(box, sum(row))
    return boxes


def _row_length(areas: Sequence[float], side: float) -> int:
    """Return how many of the areas make the best row along `side`."""
    count = 1
    while count < len(areas) and _worst(areas[: count + 1], side) <= _worst(areas[:count], side):
        count += 1
    return count


def _worst(row: Sequence[float], side: float) -> float:
    """Return the largest ratio of the sides of the rectangles of a row."""
    square = (sum(row) / side) ** 2 if side else 0
    return max(max(area / square, square / area) for area in row) if square else 0


def _row(row: Sequence[float], box: Box) -> Iterator[Box]:
    thickness = sum(row) / (min(box.width, box.height) or 1)
    along = 0.0
    for area in row:
        length = area / (thickness or 1)
        if box.width >= box.height:
            yield Box(box.x, box.y + along, thickness, length)
        else:
            yield Box(box.x + along, box.y, length, thickness)
        along += length


def _beside(box: Box, used: float) -> Box:
    """Return what a row of the area `used` leaves of a box."""
    if box.width >= box.height:
        thickness = used / (box.height or 1)
        return Box(box.x + thickness, box.y, max(0.0, box.width - thickness), box.height)
    thickness = used / (box.width or 1)
    return Box(box.x, box.y + thickness, box.width, max(0.0, box.height - thickness))
