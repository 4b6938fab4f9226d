"""Finds the step or the epoch in a line of a log."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

_END = r"(?![\w%]|\.\d)"
_BRACKETS = re.compile(r"\[\s*(\d{1,9})/\d+\]\s*\[\s*(\d{1,9})/(\d{1,9})\]")
_EPOCH = re.compile(
    rf"(?<![A-Za-z_])epoch(?:\(\w+\))?['\"\s:=.\[(]{{1,8}}(\d{{1,9}}(?:\.\d+)?){_END}(?:\s*/\s*\d+)?"
    rf"|\b(\d{{1,9}})epoch\b|\btrain(?:ing)?: +(\d{{1,9}}) +(?=\[)",
    re.IGNORECASE,
)
_RATIO = re.compile(r"(?<![\d/.])(\d{1,12})\s*/\s*(\d{1,12})(?![\d/.])")
_FIRST_RATIO = re.compile(r"\s*(\d{1,12})/(\d{1,12})\s+(?=[\[(━]|-\s)")
_STEP = re.compile(
    rf"(?<![A-Za-z/])(?:step|iter|iteration|update|batch|tick|round|episode|itn)s?['\"\s:=.\[]{{1,9}}(\d{{1,12}}){_END}",
    re.IGNORECASE,
)
_BAR = re.compile(r"(\d{1,12})/\d+ \[\d+:\d")
_INDEX = re.compile(r"(?:^|\] )\[(\d{1,12})(?:/\d+)?\]\s|^\s*(\d{1,12})\s*[|:]\s")
_HEADER = re.compile(r"\W*epoch\W{1,3}(\d{1,9})\s*/\s*\d+\W*", re.IGNORECASE)


class X(NamedTuple):
    """The place of a value on the horizontal axis."""

    name: str
    """step or epoch."""
    value: float
    """The epoch has the part of its batches that are done: 3.5 is in the middle of epoch 3."""


@dataclass
class EpochHeader:
    """The last line `Epoch 3/10`, to which following lines belong."""

    number: int | None = None

    def look(self, text: str) -> None:
        """Remember the number of a line that has nothing else."""
        if found := _HEADER.fullmatch(text):
            self.number = int(found[1])


def find_x(text: str, first: int, header: EpochHeader | None = None) -> X | None:
    """Return the step or epoch of a line, or of the header above it; None if both are missing.

    Args:
        text: The line.
        first: The place of its first metric.
        header: The last header; None: only the line counts.
    """
    if found := _BRACKETS.search(text):
        return X("epoch", int(found[1]) + _divide(found[2], found[3]))
    if found := _EPOCH.search(text):
        epoch = float(found[1] or found[2] or found[3])
        ratio = _RATIO.search(text, found.end(), max(first, found.end())) or _FIRST_RATIO.match(text)
        if ratio and int(ratio[1]) <= int(ratio[2]):
            return X("epoch", epoch + _divide(ratio[1], ratio[2]))
    if step := _STEP.search(text):
        return X("step", float(step[1]))
    if found:
        return X("epoch", epoch)
    if step := _BAR.search(text) or _INDEX.search(text):
        return X("step", float(next(filter(None, step.groups()))))
    if header is None or header.number is None:
        return None
    ratio = _FIRST_RATIO.match(text)
    return X("epoch", header.number - 1 + _divide(ratio[1], ratio[2]) if ratio else float(header.number))


def _divide(done: str, total: str) -> float:
    return int(done) / max(int(total), 1)
