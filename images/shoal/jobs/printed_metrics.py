"""Finds the metrics in a line of a log: `name=value` of any name, and the default lines of frameworks.

Keras prints `loss: 0.3 - val_loss: 0.4`, the Trainer of transformers `{'loss': '2.26', 'epoch': 1.0}`, and many scripts
`step 10 | loss 2.3 | lr 3e-4`. In these forms only names of metrics count: other numbers are times, sizes and counts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

_NUMBER = r"[-+]?(?:\d++(?:\.\d*+)?|\.\d++)(?:[eE][-+]?\d++)?"
_VALUE = rf"{_NUMBER}|[-+]?(?:nan|inf(?:inity)?)(?!\w)"
_ASSIGNED = re.compile(rf"(?<![\w.-])([A-Za-z_][\w./-]{{0,63}})=({_VALUE})(?![\w.])", re.IGNORECASE)
_PRINTED = re.compile(
    r"(?<![\w./@-])(?:(?P<part>train|training|val|valid|validation|test|eval|dev)[ _](?:set:? )?)?"
    r"(?:(?:average|avg|mean) )?"
    rf"['\"]?(?P<name>[A-Za-z][\w./@-]{{0,63}})['\"]?(?: ?: *| = | +)['\"]?(?P<value>{_VALUE})(?![\w./:]|\.\d)",
    re.IGNORECASE,
)
_WORDS = frozenset(
    (
        *("loss", "losses", "acc", "accuracy", "lr", "ppl", "perplexity", "f1", "auc", "auroc", "precision", "recall"),
        *("mae", "mse", "rmse", "mape", "r2", "nll", "bce", "elbo", "kl", "bleu", "rouge", "wer", "cer", "bpb", "bpc"),
        *("miou", "iou", "dice", "psnr", "ssim", "fid", "reward", "top1", "top5"),
    )
)
_NAMES = ("learning_rate", "grad_norm", "gnorm")
_HINT = re.compile("|".join((*_WORDS, *_NAMES)), re.IGNORECASE)
# A printed module, such as `(0): Linear(in_features=784, out_features=10, bias=True)`.
_MODULE = re.compile(r"\s*(?:\([\w.-]+\): )?(?:\d+ x )?[A-Z]\w*\(.*")
_SPLIT = re.compile(r"[_/.@-]|(?<=[a-z])(?=[A-Z])|(?<=\D)(?=\d+$)")


def find_metrics(text: str) -> Iterator[tuple[str, float]]:
    """Yield the names and values of the metrics in a line. Losses and the like may be NaN or infinite."""
    if "=" in text and not _MODULE.fullmatch(text):
        for name, number in _ASSIGNED.findall(text):
            value = float(number)
            if math.isfinite(value) or _is_metric(name):
                yield name, value
    if _HINT.search(text):
        for found in _PRINTED.finditer(text):
            if _is_metric(found["name"]):
                yield _full_name(found), float(found["value"])


def _is_metric(name: str) -> bool:
    """Whether a name is a metric's, such as val_loss, Loss_D, Acc@1 or rougeL."""
    lower = name.lower()
    parts = {lower, *(part.lower() for part in _SPLIT.split(name))}
    return bool(parts & _WORDS) or lower.endswith("loss") or lower in _NAMES or lower.startswith("rouge")


def _full_name(found: re.Match[str]) -> str:
    """Return the name with the part of the data before it: `test accuracy` is test_accuracy."""
    return f"{found['part'].lower()}_{found['name']}" if found["part"] else found["name"]
