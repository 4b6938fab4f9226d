"""The toolkit's NamedTuple behaves like the one of `typing`."""

from __future__ import annotations

import copy
import pickle
import typing
from collections.abc import Callable

import pytest

from shoal_toolkit import light_typing


class Light(light_typing.NamedTuple):
    """A record."""

    one: int
    two: str = "2"

    def both(self) -> str:
        return f"{self.one}{self.two}"


class Standard(typing.NamedTuple):
    """A record."""

    one: int
    two: str = "2"

    def both(self) -> str:
        return f"{self.one}{self.two}"


RECORDS = pytest.mark.parametrize("record", [Light, Standard])


@RECORDS
def test_a_record(record: type[Light]) -> None:
    made = record(1)
    assert (made.one, made.two, made.both()) == (1, "2", "12")
    assert made == record(one=1, two="2") == (1, "2")
    assert made._replace(two="3") == record(1, "3")
    assert repr(made) == f"{record.__name__}(one=1, two='2')"
    assert {made: True}[record(1)]
    one, two = made
    assert (one, two) == (1, "2")


@RECORDS
def test_a_record_cannot_be_changed(record: type[Light]) -> None:
    made = record(1)
    for name in ("one", "three"):
        with pytest.raises(AttributeError):
            setattr(made, name, 2)


@RECORDS
@pytest.mark.parametrize(("values", "named"), [((), {}), ((1, "2", 3), {}), ((1,), {"one": 1}), ((1,), {"three": 3})])
def test_wrong_fields(record: type[Light], values: tuple[object, ...], named: dict[str, object]) -> None:
    with pytest.raises(TypeError):
        record(*values, **named)  # type: ignore[arg-type]


@RECORDS
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda made: pickle.loads(pickle.dumps(made))])
def test_a_copy(record: type[Light], copied: Callable[[Light], Light]) -> None:
    assert copied(record(1)) == record(1)


def test_a_record_of_a_record_there_is_not() -> None:
    with pytest.raises(TypeError, match="Deeper must derive from NamedTuple alone"):

        class Deeper(Light):
            pass


def test_a_wrong_field_is_named() -> None:
    with pytest.raises(TypeError, match="Light has the fields one, two, but was given 1 values, three="):
        Light(1, three=3)  # type: ignore[call-arg]
