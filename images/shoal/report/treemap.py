"""Lays out a treemap: rectangles of given areas that are close to squares.

The method is "Squarified Treemaps" by Bruls, Huizing and van Wijk (2000). The package `squarify` is not used: it
exceeds Python's recursion limit for one large value with many small ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


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
        thickness = sum(row) / (min(box.width, box.height) or 1)
        lengths = [area / (thickness or 1) for area in row]
        offsets = accumulate(lengths, initial=0.0)
        if box.width >= box.height:
            boxes += [Box(box.x, box.y + offset, thickness, length) for length, offset in zip(lengths, offsets)]
            box = Box(box.x + thickness, box.y, max(0.0, box.width - thickness), box.height)
        else:
            boxes += [Box(box.x + offset, box.y, length, thickness) for length, offset in zip(lengths, offsets)]
            box = Box(box.x, box.y + thickness, box.width, max(0.0, box.height - thickness))
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
