"""Shared by all training scripts: hyperparameters, the digits, and the files that a job writes.

This module needs no framework; digits_torch.py and digits_tensorflow.py do. Nothing in the three is distributed: that
is shown by the scripts.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

GREATEST_PIXEL = 16
HELD_OUT = 5  # every fifth image of each digit is for the test


class Digits(NamedTuple):
    """Images, float32 (n, 8, 8) from 0 to 1, and their labels, int64 (n,)."""

    images: npt.NDArray[np.float32]
    labels: npt.NDArray[np.int64]


def arguments_parser(
    description: str | None, batch_size: str | None = "images per rank and step"
) -> argparse.ArgumentParser:
    """Return a parser of hyperparameters, which arrive as `--name value`. Paths default to SM_* variables.

    Args:
        description: The help of the script.
        batch_size: The meaning of `--batch-size`. None: the script has no such option.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--epochs", type=int, default=15)
    if batch_size is not None:
        parser.add_argument("--batch-size", type=int, default=32, help=f"{batch_size} (default: 32)")
    parser.add_argument("--lr", type=float, default=2e-3, help="Adam's learning rate (default: 0.002)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data-dir", type=Path, default=os.environ.get("SM_CHANNEL_TRAINING"))
    parser.add_argument("--model-dir", type=Path, default=os.environ.get("SM_MODEL_DIR", "model"))
    parser.add_argument("--output-data-dir", type=Path, default=os.environ.get("SM_OUTPUT_DATA_DIR", "output"))
    return parser


def checkpoint_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the options of scripts that save checkpoints, and resume with any number of ranks; return the parser."""
    from shoal_toolkit import checkpoint  # other scripts of this directory run without it

    parser.add_argument(
        "--global-batch",
        type=int,
        default=64,
        help="images in a step of all ranks, however many there are (default: 64)",
    )
    parser.add_argument(
        "--checkpoint-dir",
        default=checkpoint.directory(),
        help="resume from the newest checkpoint in this directory, and write checkpoints there "
        "(default: /opt/ml/checkpoints in a job with this directory)",
    )
    parser.add_argument(
        "--checkpoint-every", type=int, metavar="STEPS", help="steps between checkpoints (default: one for each epoch)"
    )
    return parser


def read_digits(data_dir: Path | None) -> tuple[Digits, Digits]:
    """Return the training and the test digits, from digits.npz in the channel or from scikit-learn."""
    pixels, labels = _read(data_dir)
    digits = Digits((pixels / GREATEST_PIXEL).astype(np.float32), labels.astype(np.int64))
    held_out = np.zeros(len(digits.labels), dtype=bool)
    for digit in range(10):
        held_out[np.flatnonzero(digits.labels == digit)[HELD_OUT - 1 :: HELD_OUT]] = True
    training, test = (Digits(digits.images[part], digits.labels[part]) for part in (~held_out, held_out))
    return training, test


def _read(data_dir: Path | None) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    if data_dir is None:
        from sklearn.datasets import load_digits

        digits = load_digits()
        return digits.images, digits.target
    path = data_dir / "digits.npz"
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing. Fix: python prepare.py {data_dir}")
    with np.load(path) as file:
        return file["images"], file["labels"]


def save_metrics(metrics: dict[str, float], arguments: argparse.Namespace) -> None:
    """Write metrics.json where the platform collects it, and print a summary. Called by one rank."""
    arguments.output_data_dir.mkdir(parents=True, exist_ok=True)
    (arguments.output_data_dir / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
    print(
        f"test accuracy {metrics['test_accuracy']:.4f} with world size {metrics['world_size']}, "
        f"model in {arguments.model_dir}",
        flush=True,
    )
