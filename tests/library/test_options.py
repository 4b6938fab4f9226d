"""Arguments that have no meaning."""

from __future__ import annotations

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
        ("averages", r"combine\(\) has no argument 'averages': did you mean average\?"),
        ("zzz", r"combine\(\) has no argument 'zzz': it takes average, op, tensor\."),
    ],
)
def test_unknown_arguments_are_refused(name: str, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        combine(1, **{name: True})  # type: ignore[arg-type]


@pytest.mark.once
def test_a_constructor_names_its_class() -> None:
    unknown = {"opp": "sum"}
    with pytest.raises(TypeError, match=r"Tape\(\) has no argument 'opp': did you mean op\?"):
        Tape(1, **unknown)


@pytest.mark.once
def test_what_has_no_effect_is_reported_once() -> None:
    with pytest.warns(UserWarning, match=r"^overlap\(\) has no effect: it overlaps anyway\.$") as warned:
        for _ in range(2):
            options.warn_without_effect("overlap()", "it overlaps anyway.")
    assert len(warned) == 1
