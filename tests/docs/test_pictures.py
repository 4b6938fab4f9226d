"""README.md has the pictures that benchmarks/readme_pictures.py draws, and the time of the job that it recorded."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_pictures_are_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    pictures = runpy.run_path(str(ROOT / "benchmarks" / "readme_pictures.py"))["draw_all"]()
    for name, picture in pictures.items():
        assert (ROOT / "docs" / "pictures" / name).read_text() == picture, "run benchmarks/readme_pictures.py"


def test_readme_says_how_long_the_recorded_job_took() -> None:
    job = json.loads((ROOT / "benchmarks" / "data" / "job.json").read_text())
    assert f"The second command took {job['end']:.0f} s" in (ROOT / "README.md").read_text()
