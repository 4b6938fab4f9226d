"""Finds the metrics in the lines of a log, and their step or epoch.

Keras prints `loss: 0.3 - val_loss: 0.4`, the Trainer of transformers `{'loss': '2.26', 'epoch': 1.0}`, many scripts
`step 10 | loss 2.3 | lr 3e-4`, and some tables. A line is split into words, numbers and separators. The words before a
number are its name, and `metric_words` tells which names are metrics: other numbers are times, sizes and counts.
With `name=value`, a script can print a metric of any name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from shoal.jobs.metric_words import PARTS, Kind, classify, clean_name, has_word, is_setting
from shoal.jobs.printed_steps import EpochHeader, X, find_x

_MOST = 4096  # characters of a line in which metrics are looked for
_TOKEN = re.compile(
    r"(?P<number>(?<![\w.])[-+]?(?:(?:\d++(?:\.\d*+)?|\.\d++)(?:e[-+]?\d++)?(?![\w/]|[:.-]\d)"
    r"|(?:nan|inf(?:inity)?)(?!\w)))"
    r"|(?P<word>(?<![\w./@-])[A-Za-z_](?:[\w./@-]|'(?=s\b))*+)"
    r"|(?P<ratio>(?<![\w.])\d{1,12}/\d{1,12} \(\d++(?:\.\d*+)?%\))"
    r"|(?P<separator>[:=])|(?P<space>\s+)|(?P<quote>['\"])|(?P<open>\[)|(?P<other>.)",
    re.IGNORECASE,
)
_SETTINGS = re.compile(
    r"(?<!\w)[A-Z]\w*+\([\w.]+=|^\s*(?:\([\w.-]+\): )?(?:\d+ x )?[A-Z]\w*\(|^\s*[A-Z]\w+ ?\($"
    r"|[\w'\"](?:=|: ?)(?:True|False|None|null|true|false)\b|[Ww]arning: |^\s*File \"|@\["
)
"""Lines without metrics: a call or a class with arguments, values such as True, warnings, places in code."""
_PLAIN = re.compile(r"(?:[^=]*[\]|] |[^=]* - |\w++: )?\s*+(?:[A-Za-z_][\w./-]*+=\S++[\s,;|]*+)++")
"""Nothing but `name=value`, after the prefix of a logger."""
_ROW = re.compile(r"\s*\|\s*(\S(?:[^|]*\S)?)\s*\|\s*(\S+)\s*\|\s*")
"""A table of names and values, such as Stable-Baselines' `| loss | 0.5 |`."""
_CELLS = re.compile(r"\t+| {2,}")
_COLUMN = re.compile(r"[A-Za-z#][^=|]*")
_LABEL = re.compile(
    r"(?:^|[\s(\[|-])(test|val|valid|validation|eval|evaluation|dev)(?: set| subset| dataloader \d+)?\s*(?:[:)\]|]|- )",
    re.IGNORECASE,
)
_STEPS = {"#": "step", "E": "epoch"}
"""Columns of spaCy."""


class Reading(NamedTuple):
    """The metrics in a line, and their place."""

    metrics: dict[str, float]
    """The values by name. Losses and the like may be NaN or infinite."""
    x: X | None
    """The step or the epoch; None: the line has none."""


class _Pair(NamedTuple):
    """A number with the words before it."""

    words: tuple[str, ...]
    separator: str
    """`=`, `:` or empty."""
    value: float
    place: int


_NOTHING = Reading({}, None)


@dataclass
class MetricReader:
    """Reads the lines of one rank. Remembers the header of a table, and of an epoch (`Epoch 3/10`)."""

    _header: EpochHeader = field(default_factory=EpochHeader)
    _columns: list[str] = field(default_factory=list)

    def read(self, text: str) -> Reading:
        """Return the metrics of the next line."""
        text = text[:_MOST]
        if self._columns and (row := _read_row(self._columns, text)):
            return row
        if not has_word(text) and "=" not in text:
            self._header.look(text)
            return _NOTHING
        metrics, first = _find_metrics(text)
        if not metrics:
            self._header.look(text)
            self._columns = _find_columns(text)
            return _NOTHING
        x = find_x(text, first)
        kinds = {classify((name,)) for name in metrics}
        if x is None and Kind.RATE in kinds and Kind.METRIC not in kinds:
            return _NOTHING  # settings: the learning rate of a curve has a step, or is beside a loss
        return Reading(metrics, x or find_x(text, first, self._header))


def _read_row(columns: Sequence[str], text: str) -> Reading | None:
    """Return the metrics in a row of a table; None if the line is none."""
    cells = next((cells for cells in (_CELLS.split(text.strip()), text.split()) if len(cells) == len(columns)), None)
    if cells is None and "%|" in text:  # the last cell has a progress bar
        cells = _CELLS.split(text.strip())
    if cells is None or len(cells) < len(columns):
        return None
    found = dict(zip(columns, cells))
    named = {
        name: _to_number(found[name]) for name in columns if classify(tuple(name.split())) in (Kind.METRIC, Kind.WEAK)
    }
    metrics = {clean_name(tuple(name.split())): value for name, value in named.items() if value is not None}
    if len(metrics) < len(named):
        return None
    places = [f"{_STEPS.get(name, name)} {cell.partition('/')[0]}" for name, cell in found.items()]
    steps = [x for place in places if (x := find_x(place, len(place)))]
    return Reading(metrics, next((x for x in steps if x.name == "step"), next(iter(steps), None)))


def _find_columns(text: str) -> list[str]:
    """Return the columns of the header of a table with a metric; empty if the line is none."""
    columns = _CELLS.split(text.partition("): ")[0].strip())
    if len(columns) < 3 or not all(_COLUMN.fullmatch(column) for column in columns):
        return []
    return columns if any(classify(tuple(column.split())) is Kind.METRIC for column in columns) else []


def _to_number(text: str) -> float | None:
    found = _TOKEN.fullmatch(text)
    return float(text) if found and found["number"] else None


def _find_metrics(text: str) -> tuple[dict[str, float], int]:
    """Return the metrics of a line, and where the first stands."""
    if _SETTINGS.search(text):
        return {}, 0
    if found := _ROW.fullmatch(text):
        text = f"{found[1]}: {found[2]}"
    pairs = [(pair, classify(pair.words, pair.separator)) for pair in _find_pairs(text)]
    is_strong = any(kind is Kind.METRIC for _, kind in pairs)
    is_plain = is_strong or _PLAIN.fullmatch(text) is not None or find_x(text, len(text)) is not None
    metrics: dict[str, float] = {}
    label, first = _find_label(text), len(text)
    for pair, kind in pairs:
        if not (_is_metric(pair, kind, is_strong) or (kind is Kind.OTHER and is_plain and _is_assigned(pair))):
            continue
        name = clean_name(pair.words)
        first = min(first, pair.place)
        if pair.words[0].lower() in PARTS and len(pair.words) > 1:
            label = pair.words[0].lower()
        elif label and kind is not Kind.RATE and "norm" not in name and not _has_part(name):
            name = f"{label}_{name}"
        metrics.setdefault(name, pair.value)
    return metrics, first


def _is_metric(pair: _Pair, kind: Kind, is_strong: bool) -> bool:
    if pair.words[-1].lower() == "precision" and pair.value > 1 and pair.value.is_integer():
        return False  # of floating-point numbers
    return kind in (Kind.METRIC, Kind.RATE) or (kind is Kind.WEAK and is_strong)


def _is_assigned(pair: _Pair) -> bool:
    """Return whether a pair is `name=value` with a finite value, and no setting."""
    return pair.separator == "=" and not pair.words[1:] and math.isfinite(pair.value) and not is_setting(pair.words[0])


def _has_part(name: str) -> bool:
    return re.split(r"[_/.@-]", name.lower(), maxsplit=1)[0] in PARTS


def _find_label(text: str) -> str:
    """Return the part of the data that the line is about, as in `Test: [3/10] Loss 0.3`; empty for training."""
    found = _LABEL.search(text)
    return found[1].lower() if found else ""


def _find_pairs(text: str) -> Iterator[_Pair]:
    """Yield the numbers of a line that follow words directly, after `:` or after `=`."""
    words: list[str] = []
    separator, is_open, is_apart, place = "", False, False, 0
    for token in _TOKEN.finditer(text):
        kind, found = token.lastgroup, token[0]
        if kind == "space":
            is_apart = found != " "
            continue
        if kind == "word" and not separator:
            words = [found] if is_apart else [*words, found]
            place = token.start() if len(words) == 1 else place
        elif kind == "separator" and words and not separator:
            separator = found
        elif kind == "quote" or (kind == "open" and separator and not is_open):
            is_open = is_open or kind == "open"
        elif kind == "number" and words:
            yield _Pair(tuple(words), separator, float(found), place)
            words, separator, is_open = [], "", False
        elif kind == "ratio" and words:
            done, total = map(int, found.partition(" ")[0].split("/"))
            yield _Pair(tuple(words), separator, done / max(total, 1), place)
            words, separator, is_open = [], "", False
        else:
            words, separator, is_open = ([found] if kind == "word" else []), "", False
            place = token.start()
        is_apart = False
