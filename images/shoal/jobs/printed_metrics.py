"""Finds the metrics in the lines of a log, and their step or epoch.

Keras prints `loss: 0.3 - val_loss: 0.4`, the Trainer of transformers `{'loss': '2.26', 'epoch': 1.0}`, many scripts
`step 10 | loss 2.3 | lr 3e-4`, and some tables. A line is split into words, numbers and separators. The words before a
number are its name, and their words tell which names are metrics: other numbers are times, sizes and counts.
With `name=value`, a script can print a metric of any name.
"""

from __future__ import annotations

import enum
import functools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

PARTS = frozenset(("train", "training", "val", "valid", "validation", "test", "eval", "evaluation", "dev"))
"""Parts of the data."""
_METRICS = frozenset(
    (
        *("loss", "losses", "acc", "accuracy", "ppl", "perplexity", "f1", "auc", "auroc", "precision", "recall"),
        *("mae", "mse", "rmse", "mape", "r2", "nll", "bce", "elbo", "kl", "approxkl", "bleu", "rouge", "wer", "cer"),
        *("bpb", "bpc", "xent", "logloss", "miou", "iou", "map", "map50", "dice", "psnr", "ssim", "fid", "fid50k"),
        *("reward", "rewards", "rew", "top1", "top5", "uas", "las", "pearson", "spearman", "inertia", "gnorm"),
    )
)
_WEAK = frozenset(("error", "score", "norm", "entropy", "objective", "l1"))
"""Words that count only beside a metric, or together with another word of it."""
_COMPANIONS = PARTS | {"class", "squared", "absolute", "grad", "gradient"}
_COUNTS = frozenset(
    (
        *("step", "steps", "iter", "iters", "iteration", "iterations", "epoch", "epochs", "updates", "batch", "size"),
        *("count", "num", "number", "files", "samples", "images", "tokens", "workers", "threads", "procs", "devices"),
        *("world", "node", "nodes", "nnodes", "rank", "ranks", "port", "id", "pid", "seed", "version", "bytes"),
        *("dim", "classes", "layer", "layers", "heads", "path"),
    )
)
_OTHERS = _COUNTS | frozenset(
    (
        *("scale", "weight", "weights", "coef", "coeff", "fn", "func", "function", "type", "clip", "threshold"),
        *("decay", "scheduler", "schedule", "window", "patience", "delta", "scaler", "warmup", "interval", "freq"),
        *("every", "time", "timing", "sec", "second", "seconds", "ms", "s"),
    )
)
"""Words at the end of names that are none of metrics, such as loss_scale."""
_MEANS = frozenset(("average", "avg", "mean", "set"))
"""Words that a name goes without."""
_MOST_WORDS = 3
_CACHED = 1024
_JOINTS = r"[_/.@-]"
_SPLIT = re.compile(rf"{_JOINTS}|(?<=[a-z])(?=[A-Z])")
_FILE = re.compile(r".*\.(?:py|cc|cpp|cu|h|c)")
_DIGITS = "0123456789"
_HINT = re.compile("|".join(sorted({*_METRICS, *_WEAK, "lr", "learning"})), re.IGNORECASE)


class NameKind(enum.Enum):
    """The meaning that a name gives to its number."""

    METRIC = enum.auto()
    RATE = enum.auto()
    """The learning rate, which settings have too."""
    WEAK = enum.auto()
    """A metric beside other metrics."""
    OTHER = enum.auto()


def has_word(text: str) -> bool:
    """Returns whether a text may have a metric's name."""
    return _HINT.search(text) is not None


@functools.lru_cache(_CACHED)
def classify(words: tuple[str, ...], separator: str = ":") -> NameKind:
    """Returns the kind of the words before a number. Without a separator, only the last can be the name."""
    name = _tidy(words)
    if not name or (last := _split(name[-1]))[-1] in _OTHERS or _FILE.fullmatch(name[-1]):
        return NameKind.OTHER
    if "lr" in (last[0], last[-1]) or "_".join([*name[:-1], *last]).lower().endswith("learning_rate"):
        return NameKind.RATE
    counted = [part for word in name[-_MOST_WORDS if separator else -1 :] for part in _list_parts(word)]
    if len(name) > _MOST_WORDS and not _has_metric_word(_list_parts(name[-1])):
        return NameKind.OTHER
    if _has_metric_word(counted):
        return NameKind.METRIC
    if not _WEAK & {*counted}:
        return NameKind.OTHER
    around = {part for word in name for part in _split(word)}
    return NameKind.METRIC if around & _COMPANIONS else NameKind.WEAK


def is_bar(text: str) -> bool:
    """Returns whether a line is a bar of tqdm, which is drawn with the last value again before it has the new one."""
    return _BAR.search(text) is not None


def is_setting(name: str) -> bool:
    """Returns whether `name=value` is a setting, a count or a variable of the environment: no metric of any name."""
    parts = _split(name)
    return parts[-1] in _COUNTS or parts[0] in ("num", "n", "max", "min") or name.isupper()


@functools.lru_cache(_CACHED)
def clean_name(words: tuple[str, ...]) -> str:
    """Returns the name of a metric: `Average loss` is loss, and `Train Loss` train_Loss."""
    *before, last = _tidy(words)
    if len(before) >= _MOST_WORDS:  # a sentence
        before = [word for word in before[-1:] if word.lower() in PARTS]
    return "_".join([*(word.lower() for word in before), last])


def _tidy(words: Sequence[str]) -> list[str]:
    stripped = [word.removesuffix("'s").strip(".-") for word in words if word.lower() not in ("is", "was")]
    return [word for word in stripped if word and (word.lower() not in _MEANS or len(words) == 1)]


def _split(name: str) -> list[str]:
    return [part.lower() for part in _SPLIT.split(name) if part] or [name.lower()]


def _list_parts(name: str) -> list[str]:
    """Returns the parts of a name in all ways: mAP50-95 has map50, LanguagePerplexity has perplexity."""
    return [*re.split(_JOINTS, name.lower()), *_split(name)]


def _has_metric_word(parts: Sequence[str]) -> bool:
    return any(
        part in _METRICS or part.rstrip(_DIGITS) in _METRICS or part.endswith("loss") or part.startswith("rouge")
        for part in parts
    )


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
_NEW_BAR = re.compile(r"\| 0/\d+ \[")
"""A bar of tqdm before its first step: Lightning draws it again, with values of the epoch before."""
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
        """Remembers the number of a line that has nothing else."""
        if found := _HEADER.fullmatch(text):
            self.number = int(found[1])


def find_x(text: str, first: int, header: EpochHeader | None = None) -> X | None:
    """Returns the step or epoch of a line, or of the header above it; None if both are missing.

    Args:
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
_ROW = re.compile(r"\s*[|│]\s*(\S(?:[^|│]*[^\s|│])?)\s*[|│]\s*([^\s|│]+)\s*[|│]\s*")
"""A table of names and values, such as Stable-Baselines' `| loss | 0.5 |`, and Lightning's of test results."""
_CELLS = re.compile(r"\t+| {2,}")
_COLUMN = re.compile(r"[A-Za-z#][^=|]*")
_LABEL = re.compile(
    r"(?:^|[\s(\[|-])(?:(test|val|valid|validation|eval|evaluation|dev)(?: set| subset| dataloader \d+)?"
    r"\s*(?:[:)\]|]|- )"
    r"|(val)idate step:)",
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
class LineReader:
    """Reads the lines of one rank. Remembers the header of a table, and of an epoch (`Epoch 3/10`)."""

    _header: EpochHeader = field(default_factory=EpochHeader)
    _columns: list[str] = field(default_factory=list)

    def read(self, text: str) -> Reading:
        """Returns the metrics of the next line."""
        text = text[:_MOST]
        if self._columns and (row := _read_row(self._columns, text)):
            return row
        if (not has_word(text) and "=" not in text) or _NEW_BAR.search(text):
            self._header.look(text)
            return _NOTHING
        metrics, first = _find_metrics(text)
        if not metrics:
            self._header.look(text)
            self._columns = _find_columns(text)
            return _NOTHING
        x = find_x(text, first)
        kinds = {classify((name,)) for name in metrics}
        if x is None and NameKind.RATE in kinds and NameKind.METRIC not in kinds:
            return _NOTHING  # settings: the learning rate of a curve has a step, or is beside a loss
        return Reading(metrics, x or find_x(text, first, self._header))


def _read_row(columns: Sequence[str], text: str) -> Reading | None:
    cells = next((cells for cells in (_CELLS.split(text.strip()), text.split()) if len(cells) == len(columns)), None)
    if cells is None and "%|" in text:  # the last cell has a progress bar
        cells = _CELLS.split(text.strip())
    if cells is None or len(cells) < len(columns):
        return None
    found = dict(zip(columns, cells))
    named = {
        name: _to_number(found[name])
        for name in columns
        if classify(tuple(name.split())) in (NameKind.METRIC, NameKind.WEAK)
    }
    metrics = {clean_name(tuple(name.split())): value for name, value in named.items() if value is not None}
    if len(metrics) < len(named):
        return None
    places = [f"{_STEPS.get(name, name)} {cell.partition('/')[0]}" for name, cell in found.items()]
    steps = [x for place in places if (x := find_x(place, len(place)))]
    return Reading(metrics, next((x for x in steps if x.name == "step"), next(iter(steps), None)))


def _find_columns(text: str) -> list[str]:
    """Returns the columns of the header of a table with a metric; empty if the line is none."""
    columns = _CELLS.split(text.partition("): ")[0].strip())
    if len(columns) < 3 or not all(_COLUMN.fullmatch(column) for column in columns):
        return []
    return columns if any(classify(tuple(column.split())) is NameKind.METRIC for column in columns) else []


def _to_number(text: str) -> float | None:
    found = _TOKEN.fullmatch(text)
    return float(text) if found and found["number"] else None


def _find_metrics(text: str) -> tuple[dict[str, float], int]:
    """Returns the metrics of a line, and where the first stands."""
    if _SETTINGS.search(text):
        return {}, 0
    if found := _ROW.fullmatch(text):
        text = f"{found[1]}: {found[2]}"
    pairs = [(pair, classify(pair.words, pair.separator)) for pair in _find_pairs(text)]
    is_strong = any(kind is NameKind.METRIC for _, kind in pairs)
    is_plain = is_strong or _PLAIN.fullmatch(text) is not None or find_x(text, len(text)) is not None
    metrics: dict[str, float] = {}
    (label, labelled), first = _find_label(text), len(text)
    for pair, kind in pairs:
        if not (_is_metric(pair, kind, is_strong) or (kind is NameKind.OTHER and is_plain and _is_assigned(pair))):
            continue
        name = clean_name(pair.words)
        first = min(first, pair.place)
        if pair.words[0].lower() in PARTS and len(pair.words) > 1:
            label, labelled = pair.words[0].lower(), pair.place
        elif pair.place > labelled and kind is not NameKind.RATE and "norm" not in name and not _has_part(name):
            name = f"{label}_{name}"
        metrics.setdefault(name, pair.value)
    return metrics, first


def _is_metric(pair: _Pair, kind: NameKind, is_strong: bool) -> bool:
    if pair.words[-1].lower() == "precision" and pair.value > 1 and pair.value.is_integer():
        return False  # of floating-point numbers
    return kind in (NameKind.METRIC, NameKind.RATE) or (kind is NameKind.WEAK and is_strong)


def _is_assigned(pair: _Pair) -> bool:
    return pair.separator == "=" and not pair.words[1:] and math.isfinite(pair.value) and not is_setting(pair.words[0])


def _has_part(name: str) -> bool:
    return re.split(r"[_/.@-]", name.lower(), maxsplit=1)[0] in PARTS


def _find_label(text: str) -> tuple[str, int]:
    """Returns the part of the data that the rest of the line is about, as in `Test: [3/10] Loss 0.3`, and its place."""
    found = _LABEL.search(text)
    return ((found[1] or found[2]).lower(), found.start()) if found else ("", len(text))


def _find_pairs(text: str) -> Iterator[_Pair]:
    """Yields the numbers of a line that follow words directly, after `:` or after `=`."""
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
