"""The words after `train`: its own options, typos of them, and arguments of the script."""

from __future__ import annotations

import pytest

from shoal_toolkit.command_line import parse_command_line
from shoal_toolkit.errors import ContractError

from .conftest import Run, Tree


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        ("", (False, False, False, "")),
        ("--epochs 3", (False, False, False, "--epochs 3")),
        ("--explain", (True, False, False, "")),
        ("--explain --json", (True, True, False, "")),
        ("--json", (False, False, False, "--json")),
        ("--explain --lr 1 --json", (True, False, False, "--lr 1 --json")),
        ("--epochs 3 --explain", (True, False, False, "--epochs 3")),
        ("--epochs --explain 3", (True, False, False, "--epochs 3")),
        ("--rehearse --explain --json x", (True, True, True, "x")),
        ("--epochs 3 --rehearse", (False, False, True, "--epochs 3")),
        ("-- --explain", (False, False, False, "--explain")),
        ("--rehearse -- --explian", (False, False, True, "--explian")),
        ("--explain -- --rehearse", (True, False, False, "--rehearse")),
        ("a -- --explain", (False, False, False, "a -- --explain")),
        ("-- -- a", (False, False, False, "-- a")),
    ],
)
def test_our_options_count_wherever_they_stand_before_the_dashes(
    words: str, asked: tuple[bool, bool, bool, str]
) -> None:
    *flags, arguments = asked
    assert parse_command_line(words.split()) == (*flags, False, arguments.split())
    assert parse_command_line(["--preflight", *words.split()])[3]


@pytest.mark.parametrize("where", [0, 1, 2])
@pytest.mark.parametrize(
    ("slip", "meant"),
    [
        *((slip, "--explain") for slip in ("--explian", "--explan", "--eplain", "--explane", "--Explain", "-explain")),
        *((slip, "--explain") for slip in ("\u2014explain", "--explain=", "--explain=true", "--explains")),
        *((slip, "--preflight") for slip in ("--prefligth", "--preflght", "--preflight=1", "--pre-flight")),
        *((slip, "--rehearse") for slip in ("--reherse", "--rehearce", "--rehaerse", "--rehearse=1")),
    ],
)
def test_slips_are_refused(slip: str, meant: str, where: int) -> None:
    words = ["--lr", "1"]
    words.insert(where, slip)
    with pytest.raises(ContractError) as refused:
        parse_command_line(words)
    assert f"{slip!r} is not an option of `train`. Did you mean {meant!r}?" in str(refused.value)
    assert f"Fix: if it is an option of the script, write it after `--`: train -- {slip}" in str(refused.value)
    assert parse_command_line(["--", *words]).arguments == words


@pytest.mark.parametrize(
    "word",
    ["--reverse", "--plain", "--explore", "--research", "--epxalim", "--epochs", "explain", "--e", "--json", "-"],
)
def test_other_options_are_the_scripts(word: str) -> None:
    assert parse_command_line([word]) == (False, False, False, False, [word])


@pytest.mark.parametrize("words", [["--epochs", "3", "--explain"], ["--explian"], ["--lr", "1", "--reherse"]])
def test_a_job_that_was_to_be_explained_does_not_start(tree: Tree, run: Run, words: list[str]) -> None:
    tree.script("open('ran', 'w')")
    done = run(*words, SAGEMAKER_PROGRAM="train.py")
    assert not (tree.code / "ran").exists()
    assert tree.outcome() == set()
    assert done.code == (0 if "--explain" in words else 2)
    assert ("launcher " in done.out) == ("--explain" in words)
    assert ("Did you mean" in done.err) == ("--explain" not in words)
