"""docs/api: signatures and docstrings, AWS's versions of names, and every variable that the library names."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import Any

import pytest
import tomllib

ROOT = Path(__file__).parents[2]
with pytest.MonkeyPatch.context() as _scripts:
    _scripts.syspath_prepend(str(ROOT / "scripts"))
    DATAPARALLEL: Any = importlib.import_module("reference_pages.dataparallel")
    API: Any = importlib.import_module("reference_pages.api")
    NAMES: Any = importlib.import_module("reference_pages.names")
    SIGNATURES: Any = importlib.import_module("reference_pages.signatures")


def test_every_package_with_versions_is_on_a_page() -> None:
    shown = {package for _, packages in API.PAGES.values() for package in packages} | set(NAMES.PACKAGES)
    assert set(tomllib.loads(NAMES.VERSIONS.read_text())) <= shown | {"mp_parameters"}


def test_versions_and_states_of_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a function, a method, an inherited method, a function that is refused, and names that the library lacks."""
    package = "smdistributed.modelparallel.torch"
    methods = [f"DistributedModel.{name}" for name in ("backward", "local_parameters", "nowhere")]
    (tmp_path / "versions.toml").write_text(
        f'["{package}"]\n"1.7" = "init lacking prepare_optimizer {" ".join(methods)}"\n'
    )
    monkeypatch.setattr(NAMES, "VERSIONS", tmp_path / "versions.toml")
    page = API.write("modelparallel.md")
    assert "### init\n\n```python\ndef init(" in page
    assert "### lacking\n\nAWS: 1.7. Missing here." in page
    backward = "def backward(tensors: Any, grad_tensors: Any = None) -> None"
    assert f"#### DistributedModel.backward\n\n```python\n{backward}\n```\n\nAWS: 1.7.\n" in page
    assert "def local_parameters() -> Iterator[nn.Parameter]\n```\n\nAWS: 1.7.\n" in page
    assert "**__: Any) -> NoReturn\n```\n\nAWS: 1.7, not supported here.\n" in page
    assert "#### DistributedModel.nowhere\n\nAWS: 1.7. An attribute" in page
    assert "def size() -> int\n```\n\nNot in AWS's library.\n" in page
    rows = NAMES.write()
    assert "| `lacking` | 1.7 | missing |" in rows
    assert "| `init` | 1.7 | works |" in rows
    assert "| `size` | – | works |" in rows


def test_a_definition_that_two_packages_have_is_described_once() -> None:
    page = API.write("dataparallel-tensorflow.md")
    assert page.count("def oob_allreduce(") == 1
    assert "Not in AWS's library. The same as `smdistributed.dataparallel.tensorflow.allgather`." in page


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        (
            "def f(a, /, b: int = 1, *c, d: str = 'x', **e) -> int: ...",
            "def f(a, b: int = 1, *c, d: str = 'x', **e) -> int",
        ),
        ("class C(Base):\n    def __init__(self, *, a: int) -> None: ...", "class C(*, a: int)"),
        ("class C(NamedTuple):\n    a: int\n    b = 1", "class C(NamedTuple):\n    a: int"),
        ("class C(enum.Enum):\n    A = 'a'", 'class C(Enum):\n    A = "a"'),
        (f"def f({'a' * 50}, {'b' * 50}): ...", f"def f(\n    {'a' * 50},\n    {'b' * 50},\n)"),
    ],
)
def test_signatures(source: str, shown: str) -> None:
    assert SIGNATURES.show_definition(ast.parse(source).body[0]) == shown


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
    assert DATAPARALLEL.prose(docstring) == markdown


def test_a_name_without_a_docstring_is_refused() -> None:
    class UndocumentedError(ValueError):
        pass

    with pytest.raises(SystemExit, match=r"m\.UndocumentedError has no docstring"):
        DATAPARALLEL._docstring(UndocumentedError, "m.UndocumentedError")


def test_a_variable_that_the_table_lacks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = (ROOT / "docs" / "api" / "variables.toml").read_text()
    (tmp_path / "variables.toml").write_text(table.replace("SMDDP_ENGINE =", "SMDDP_ENGNE ="))
    monkeypatch.setattr(DATAPARALLEL, "VARIABLES", tmp_path / "variables.toml")
    with pytest.raises(SystemExit, match=r"SMDDP_ENGINE is missing in docs/api/variables\.toml"):
        list(DATAPARALLEL._variables())
