"""docs/api/dataparallel.md: what the docstrings say, and every variable that the library names."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = runpy.run_path(str(ROOT / "scripts" / "api_docs.py"))


def test_the_page_is_fresh() -> None:
    assert (ROOT / "docs" / "api" / "dataparallel.md").read_text() == DOCS["page"](), "run make docs"


@pytest.mark.parametrize(
    ("docstring", "markdown"),
    [
        (
            "Do it.\n\npath: a file,\n    or none.\nrank: from 0.",
            "Do it.\n\n- `path`: a file,\n  or none.\n- `rank`: from 0.",
        ),
        ("Do it.\n\n    path: 3\n    rank\n\nDone.", "Do it.\n\n    path: 3\n    rank\n\nDone."),
        ("Do it\nwith this: that.", "Do it\nwith this: that."),
        (
            "Do it.\n\nArgs:\n    path: A file,\n        or none.\n    *rest: More.\n\nReturns:\n    The\n    sum.\n",
            "Do it.\n\nArgs:\n\n- `path`: A file,\n  or none.\n- `*rest`: More.\n\nReturns: The sum.",
        ),
        (
            "Do it.\n\nRaises:\n    SMDDPError: If not.\n\nExample:\n    if a:\n        b()",
            "Do it.\n\nRaises:\n\n- `SMDDPError`: If not.\n\nExample:\n\n```python\nif a:\n    b()\n```",
        ),
    ],
)
def test_parameters_become_a_list_and_code_stays(docstring: str, markdown: str) -> None:
    assert DOCS["_prose"](docstring) == markdown


def test_a_name_without_a_docstring_is_refused() -> None:
    class UndocumentedError(ValueError):
        pass

    with pytest.raises(SystemExit, match=r"m\.UndocumentedError has no docstring"):
        DOCS["_docstring"](UndocumentedError, "m.UndocumentedError")


def test_a_variable_that_the_table_lacks_is_refused(tmp_path: Path) -> None:
    table = (ROOT / "docs" / "api" / "variables.toml").read_text()
    (tmp_path / "variables.toml").write_text(table.replace("SMDDP_ENGINE =", "SMDDP_ENGNE ="))
    variables = DOCS["_variables"]
    before = variables.__globals__["VARIABLES"]
    variables.__globals__["VARIABLES"] = tmp_path / "variables.toml"
    try:
        with pytest.raises(SystemExit, match=r"SMDDP_ENGINE is missing in docs/api/variables\.toml"):
            list(variables())
    finally:
        variables.__globals__["VARIABLES"] = before
