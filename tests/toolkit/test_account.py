"""A job of a user ID without an account, such as `docker run --user 12345`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shoal_toolkit.system import account

from .conftest import Run, Tree

NOBODY = 2**31 - 7


@pytest.fixture
def nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: NOBODY)


def test_a_user_with_a_home_and_a_name_keeps_both(tmp_path: Path) -> None:
    assert account.build_account_variables({"HOME": str(tmp_path)}) == {}


@pytest.mark.usefixtures("nobody")
@pytest.mark.parametrize("home", [None, "", "/", "/nonexistent"])
def test_an_unknown_user_gets_a_home_and_a_name(home: str | None) -> None:
    found = account.build_account_variables({} if home is None else {"HOME": home})
    assert (found["USER"], found["LOGNAME"]) == ("train", "train")
    made = Path(found["HOME"])
    assert made.stat().st_mode & 0o777 == 0o700
    made.rmdir()


@pytest.mark.usefixtures("nobody")
def test_a_name_and_a_home_that_are_set_stay(tmp_path: Path) -> None:
    assert account.build_account_variables({"HOME": str(tmp_path), "USER": "me"}) == {}
    assert account.build_account_variables({"HOME": str(tmp_path), "LOGNAME": "me"}) == {}


def test_without_a_place_home_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: str, mode: int) -> None:
        raise FileNotFoundError(path)

    monkeypatch.setattr(os, "mkdir", fail)
    assert account.build_account_variables({"HOME": "/nonexistent", "USER": "me"}) == {}


def test_a_script_can_write_to_its_home(tree: Tree, run: Run) -> None:
    tree.script(
        "import os, pathlib\nhome = pathlib.Path.home()\n(home / '.cache').mkdir()\nprint(home)\n"
        "(home / '.cache').rmdir(); home.rmdir()"
    )
    done = run(SAGEMAKER_PROGRAM="train.py", HOME="/nonexistent")
    assert done.code == 0, done.err
    assert Path(done.out.strip()).name.startswith("home-")
