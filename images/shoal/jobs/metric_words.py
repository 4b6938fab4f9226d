"""Tells the names of metrics from other names, by their words."""

from __future__ import annotations

import enum
import functools
import re
from collections.abc import Sequence

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


class Kind(enum.Enum):
    """The meaning that a name gives to its number."""

    METRIC = enum.auto()
    RATE = enum.auto()
    """The learning rate, which settings have too."""
    WEAK = enum.auto()
    """A metric beside other metrics."""
    OTHER = enum.auto()


def has_word(text: str) -> bool:
    """Return whether a text may have a metric's name."""
    return _HINT.search(text) is not None


@functools.lru_cache(_CACHED)
def classify(words: tuple[str, ...], separator: str = ":") -> Kind:
    """Return the kind of the words before a number. Without a separator, only the last can be the name."""
    name = _tidy(words)
    if not name or (last := _split(name[-1]))[-1] in _OTHERS or _FILE.fullmatch(name[-1]):
        return Kind.OTHER
    if "lr" in (last[0], last[-1]) or "_".join([*name[:-1], *last]).lower().endswith("learning_rate"):
        return Kind.RATE
    counted = [part for word in name[-_MOST_WORDS if separator else -1 :] for part in _list_parts(word)]
    if len(name) > _MOST_WORDS and not _is_metric(_list_parts(name[-1])):
        return Kind.OTHER
    if _is_metric(counted):
        return Kind.METRIC
    if not _WEAK & {*counted}:
        return Kind.OTHER
    around = {part for word in name for part in _split(word)}
    return Kind.METRIC if around & _COMPANIONS else Kind.WEAK


def is_setting(name: str) -> bool:
    """Return whether `name=value` is a setting, a count or a variable of the environment: no metric of any name."""
    parts = _split(name)
    return parts[-1] in _COUNTS or parts[0] in ("num", "n", "max", "min") or name.isupper()


@functools.lru_cache(_CACHED)
def clean_name(words: tuple[str, ...]) -> str:
    """Return the name of a metric: `Average loss` is loss, and `Train Loss` train_Loss."""
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
    """Return the parts of a name in all ways: mAP50-95 has map50, LanguagePerplexity has perplexity."""
    return [*re.split(_JOINTS, name.lower()), *_split(name)]


def _is_metric(parts: Sequence[str]) -> bool:
    return any(
        part in _METRICS or part.rstrip(_DIGITS) in _METRICS or part.endswith("loss") or part.startswith("rouge")
        for part in parts
    )
