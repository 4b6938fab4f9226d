"""scripts/affected.py: which tests a change can affect, and that its table leaves nothing out."""

from __future__ import annotations

import runpy
import subprocess
from pathlib import Path
from typing import Any

import pytest
import tomllib

pytestmark = pytest.mark.xdist_group("affected")  # the imports of all files are read once
ROOT = Path(__file__).resolve().parents[1]
SCRIPT: dict[str, Any] = runpy.run_path(str(ROOT / "scripts/affected.py"))
ROWS: dict[str, list[str]] = tomllib.loads((ROOT / "tests/affected.toml").read_text())
PRODUCT = ("images", "toolkit", "checkpoint", "library", "rehearsal", "dockerfiles", "examples")


def tracked() -> list[str]:
    return subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()


def chosen(*changed: str) -> set[str]:
    found = SCRIPT["affected"](changed, SCRIPT["test_files"](), ROWS)
    return {test for test, names in found.items() if names}


@pytest.mark.parametrize(
    ("changed", "some", "others"),
    [
        ("toolkit/shoal_toolkit/hosts/wire.py", "tests/toolkit/test_wire.py", "tests/library/test_smddp.py"),
        ("toolkit/shoal_toolkit/hosts/wire.py", "tests/faults/test_losses.py", "tests/library/test_store.py"),
        (
            "library/smdistributed/modelparallel/torch/pipeline/stage.py",
            "tests/library/test_modelparallel.py",
            "tests/toolkit",
        ),
        ("library/native/reduce.c", "tests/integration/test_library.py", "tests/faults"),
        ("rehearsal/shoal_rehearsal/settings.py", "tests/library/test_rehearsal.py", "tests/toolkit/test_plan.py"),
        ("dockerfiles/base.j2", "tests/integration/test_structure.py", "tests/toolkit"),
        ("tests/library/ranks/smddp.py", "tests/library/test_smddp.py", "tests/images"),
        ("tests/containers.py", "tests/faults/test_signals.py", "tests/toolkit"),
        ("images/shoal/jobs/printed_metrics.py", "tests/images/test_printed_metrics.py", "tests/integration"),
        ("images/shoal/jobs/printed_metrics.py", "tests/images/test_job_report.py", "tests/images/test_bu"),
        ("images/shoal/builds/graph.py", "tests/images/test_builds.py", "tests/integration"),  # by the command
        ("images/shoal/builds/builder.py", "tests/integration/test_build.py", "tests/integration/test_run"),
        ("images/shoal/report/job.html.j2", "tests/images/test_job_report.py", "tests/integration"),
        ("examples/digits/train.py", "tests/integration/test_run.py", "tests/images"),
    ],
)
def test_a_change_runs_what_it_can_affect(changed: str, some: str, others: str) -> None:
    assert (ROOT / changed).exists()
    assert some in chosen(changed)
    assert not [test for test in chosen(changed) if test.startswith(others)]


def test_a_change_of_what_all_stand_on_runs_all() -> None:
    assert chosen("requirements/dev.txt") == chosen("tests/conftest.py") == set(SCRIPT["test_files"]())


@pytest.mark.long
def test_each_file_of_the_product_affects_some_test() -> None:
    files = [name for name in tracked() if name.startswith(PRODUCT)]
    found = SCRIPT["affected"](files, SCRIPT["test_files"](), ROWS)
    assert set(files) - {name for names in found.values() for name in names} == set()


def test_each_row_is_of_files_that_there_are() -> None:
    names = tracked()
    for tests, needs in ROWS.items():
        for pattern in (tests, *needs):
            assert any(SCRIPT["glob"](pattern).fullmatch(name) for name in names), f"{tests}: {pattern}"
