"""Arguments that have no meaning."""

from __future__ import annotations

import warnings

import pytest

from smdistributed.core import options


@options.only_known
def combine(tensor: object, *, average: bool = True, op: str = "sum") -> tuple[object, bool, str]:
    return tensor, average, op


class Tape:
    @options.only_known
    def __init__(self, tape: object, op: str = "sum") -> None:
        self.tape, self.op = tape, op


@pytest.mark.once
def test_known_arguments_arrive() -> None:
    assert combine(1, average=False) == (1, False, "sum")
    assert Tape(2, op="max").op == "max"
    assert combine.__name__ == "combine"


@pytest.mark.once
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("averages", r"combine\(\) got an unexpected keyword argument 'averages'\. Did you mean 'average'\?"),
        ("zzz", r"combine\(\) got an unexpected keyword argument 'zzz'\. It has: tensor, average, op\."),
    ],
)
def test_unknown_arguments_are_refused(name: str, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        combine(1, **{name: True})  # type: ignore[arg-type]


@pytest.mark.once
def test_a_constructor_names_its_class() -> None:
    unknown = {"opp": "sum"}
    with pytest.raises(TypeError, match=r"Tape\(\) got an unexpected keyword argument 'opp'\. Did you mean 'op'\?"):
        Tape(1, **unknown)
    with pytest.raises(TypeError, match=r"It has: tape, op\.$"):
        Tape(1, zzz=1)  # type: ignore[call-arg]


@pytest.mark.once
@pytest.mark.parametrize("name", ["RANK", "OMPI_COMM_WORLD_RANK"])
def test_only_the_first_rank_warns(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A script under mpirun without `train` has no RANK."""
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv(name, "1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        options.warn_without_effect("An option", "of this")
    for rank in ("0", ""):
        monkeypatch.setenv(name, rank)
        with pytest.warns(UserWarning, match=r"^An option has no effect: of this\.$"):
            options.warn_without_effect("An option", "of this")
