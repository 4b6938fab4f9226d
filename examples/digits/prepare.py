"""Write digits.npz, the channel of train.py: `python prepare.py DIRECTORY`. The file is the same every time."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits


def main() -> None:
    """Write `images`, uint8 (1797, 8, 8) from 0 to 16, and `labels`, uint8 (1797,)."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, help="created if it does not exist")
    directory = parser.parse_args().directory
    directory.mkdir(parents=True, exist_ok=True)
    digits = load_digits()
    np.savez_compressed(
        directory / "digits.npz", images=digits.images.astype(np.uint8), labels=digits.target.astype(np.uint8)
    )
    print(f"{len(digits.target)} digits in {directory / 'digits.npz'}")


if __name__ == "__main__":
    main()
