"""Shared by the scripts for TensorFlow and for model parallelism: hyperparameters, the digits and the metrics.

Needs no framework. train.py has its own, so that you can copy it alone.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class Digits(NamedTuple):
    """Images, float32 (n, 8, 8) from 0 to 1, and their labels, int64 (n,)."""

    images: npt.NDArray[np.float32]
    labels: npt.NDArray[np.int64]


def arguments_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser of hyperparameters, which arrive as `--name value`. Paths default to SM_* variables."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--lr", type=float, default=2e-3, help="Adam's learning rate (default: 0.002)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data-dir", type=Path, default=os.environ.get("SM_CHANNEL_TRAINING"))
    parser.add_argument("--model-dir", type=Path, default=os.environ.get("SM_MODEL_DIR", "model"))
    parser.add_argument("--output-data-dir", type=Path, default=os.environ.get("SM_OUTPUT_DATA_DIR", "output"))
    return parser


def read_digits(data_dir: Path | None) -> tuple[Digits, Digits]:
    """Return the training and the test digits, from digits.npz in `data_dir` or from scikit-learn.

    Every fifth image of each digit is for the test.
    """
    if data_dir is None:
        from sklearn.datasets import load_digits

        pixels, numbers = load_digits().images, load_digits().target
    else:
        path = data_dir / "digits.npz"
        if not path.exists():
            raise FileNotFoundError(f"{path} is missing. Fix: python prepare.py {data_dir}")
        with np.load(path) as file:
            pixels, numbers = file["images"], file["labels"]
    images, labels = (pixels / 16).astype(np.float32), numbers.astype(np.int64)
    held_out = np.zeros(len(labels), dtype=bool)
    for digit in range(10):
        held_out[np.flatnonzero(labels == digit)[4::5]] = True
    return Digits(images[~held_out], labels[~held_out]), Digits(images[held_out], labels[held_out])


def save_metrics(metrics: dict[str, float], arguments: argparse.Namespace) -> None:
    """Write metrics.json where the platform collects it, and print a summary. Called by one rank."""
    arguments.output_data_dir.mkdir(parents=True, exist_ok=True)
    (arguments.output_data_dir / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
    print(
        f"test accuracy {metrics['test_accuracy']:.4f} with world size {metrics['world_size']}, "
        f"model in {arguments.model_dir}",
        flush=True,
    )
