"""The pictures of README.md are those that benchmarks/readme_pictures.py draws from the recorded figures."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_pictures_are_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    pictures = runpy.run_path(str(ROOT / "benchmarks" / "readme_pictures.py"))["draw_all"]()
    for name, picture in pictures.items():
        assert (ROOT / "docs" / "pictures" / name).read_text() == picture, "run benchmarks/readme_pictures.py"
