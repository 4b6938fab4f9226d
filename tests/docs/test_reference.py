"""The generated pages of docs/reference: descriptions are complete, and the state of a name follows from its source."""

from __future__ import annotations

import ast
import importlib
import runpy
from pathlib import Path
from typing import Any

import pytest

import shoal_checkpoint
from shoal.errors import SpecError
from shoal.jobs import run
from shoal_toolkit import errors

ROOT = Path(__file__).parents[2]
PAGES = (
    *("shoal", "variables", "images", "buildspec", "json", "../exit-codes", "hyperparameters", "launchers"),
    *("mp-parameters", "python", "releases", "../migrate/smdistributed"),
    *(f"../api/{part}parallel{end}" for part, end in (("data", ""), ("data", "-tensorflow"), ("model", ""))),
    "../api/modelparallel-tensorflow",
)


@pytest.fixture(autouse=True)
def _scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))


def test_the_pages_are_fresh() -> None:
    pages = runpy.run_path(str(ROOT / "scripts" / "reference.py"))["PAGES"]
    assert list(pages) == [f"{name}.md" for name in PAGES]
    for name, write in pages.items():
        assert (ROOT / "docs" / "reference" / name).read_text() == write(), "run make reference"


@pytest.mark.parametrize(
    ("number", "text", "problem"), [(3, "New.\n\nFix: x", "one exit code"), (99, "New.", "no fix")]
)
def test_each_failure_has_its_own_exit_code_and_a_fix(
    monkeypatch: pytest.MonkeyPatch, number: int, text: str, problem: str
) -> None:
    exit_codes: Any = importlib.import_module("reference_pages.exit_codes")
    new = type("NewError", (Exception,), {"exit_code": number, "__doc__": text})
    monkeypatch.setattr(exit_codes, "_list_kinds", lambda _: [SpecError, new])
    with pytest.raises(SystemExit, match=problem):
        exit_codes.write()


def test_a_document_without_a_description_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    documents: Any = importlib.import_module("reference_pages.documents")
    monkeypatch.delitem(documents._RESULTS, "lock")
    with pytest.raises(SystemExit, match="`shoal lock --json` has no description"):
        documents.write()


def test_train_ends_only_with_codes_that_have_a_name() -> None:
    """The page lists the named ones. `Result(3, ...)` would be missing there."""
    calls = [
        node
        for path in (ROOT / "toolkit" / "shoal_toolkit").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "Result"
    ]
    assert calls
    assert not [ast.unparse(call) for call in calls if isinstance(call.args[0], ast.Constant)]


def test_shoal_and_train_agree_on_exit_codes() -> None:
    known = run.WRONG_CONFIGURATION, run.HOST_LOST, run.STOPPED
    assert known == (errors.WRONG_CONFIGURATION, errors.HOST_LOST, shoal_checkpoint.STOPPED)


@pytest.mark.parametrize(
    ("package", "name", "state"),
    [
        ("smdistributed.modelparallel.torch", "DistributedModel", "works"),
        ("smdistributed.modelparallel.torch", "model_creation", "works"),
        ("smdistributed.modelparallel.torch", "tp_register", "works"),
        ("smdistributed.modelparallel.torch.nn", "DistributedLinear", "works"),
        ("smdistributed.modelparallel.torch", "nn", "module"),
        ("smdistributed.dataparallel.tensorflow", "allreduce", "works"),
        ("smdistributed.dataparallel.tensorflow", "overlap", "no effect"),
        ("smdistributed.dataparallel.tensorflow", "join", "not supported"),
    ],
)
def test_the_state_of_a_name_follows_from_its_source(package: str, name: str, state: str) -> None:
    names: Any = importlib.import_module("reference_pages.names")
    assert names.explain(package, name)[0] == state


@pytest.mark.parametrize(
    ("module", "table", "before", "after", "message"),
    [
        ("mp_parameters", "EFFECTS", "fp16 =", "fp15 =", "fp15 is only in"),
        ("hyperparameters", "MEANINGS", "sagemaker_program =", "sagemaker_programme =", "sagemaker_program is only in"),
        ("variables", "MEANINGS", "SM_HOSTS =", "SM_GUESTS =", "The variable SM_HOSTS has no description"),
        ("migration", "SUCCESSORS", "all_gather =", "gather_all =", "all_gather has no entry"),
        ("releases", "NOTES", 'version = "', 'version = "9', "the library is"),
        ("variables", "MEANINGS", "[input]", 'SHOAL_X = ["", ""]\n[input]', "`train` has no variable SHOAL_X"),
    ],
)
def test_a_missing_or_extra_description_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, table: str, before: str, after: str, message: str
) -> None:
    page: Any = importlib.import_module(f"reference_pages.{module}")
    path: Path = getattr(page, table)
    text = path.read_text()
    assert before in text
    (tmp_path / path.name).write_text(text.replace(before, after, 1))
    monkeypatch.setattr(page, table, tmp_path / path.name)
    with pytest.raises(SystemExit, match=message):
        page.write()
