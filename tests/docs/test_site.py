"""The site builds, and has each page of the navigation; links and anchors that lead nowhere are errors."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.long
def test_the_site_builds(tmp_path: Path) -> None:
    """As `make docs`, which also writes the generated pages."""
    subprocess.run(["make", "--no-print-directory", ".venv-docs/stamp"], cwd=ROOT, check=True, timeout=300)
    site = tmp_path / "site"
    command = [".venv-docs/bin/mkdocs", "build", "--strict", "--site-dir", str(site)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert built.returncode == 0, built.stdout + built.stderr
    listed = re.findall(r": ([\w/.-]+)\.md$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert len(listed) > 20
    missing = [page for page in listed if not (site / page.replace("README", "index")).with_suffix(".html").exists()]
    assert missing == []
