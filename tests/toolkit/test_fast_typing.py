"""The named tuples of `train`, which are made without the module `typing`."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys

import pytest

from shoal_toolkit.fast_typing import NamedTuple


class Place(NamedTuple):
    """A class as those of the toolkit."""

    host: str
    rank: int = 0

    @property
    def text(self) -> str:
        return f"rank {self.rank} on {self.host}"


def test_fields_come_by_position_by_name_and_by_default() -> None:
    assert Place("a", 2) == Place(rank=2, host="a") == ("a", 2)
    assert Place("a") == Place(host="a") == Place("a", 0)
    host, rank = Place("a", 3)
    assert (host, rank, Place("a", 3).text, Place._fields) == ("a", 3, "rank 3 on a", ("host", "rank"))
    assert repr(Place("a")) == "Place(host='a', rank=0)"


def test_replace_makes_another_tuple() -> None:
    place = Place("a", 1)
    assert (place._replace(rank=2), place) == (Place("a", 2), Place("a", 1))
    with pytest.raises(ValueError, match="Place has no field size"):
        place._replace(size=1)  # type: ignore[call-arg]


@pytest.mark.parametrize("call", ["Place()", "Place('a', 1, 2)", "Place('a', size=1)", "Place('a', host='b')"])
def test_other_arguments_are_errors(call: str) -> None:
    with pytest.raises(TypeError, match="Place has the fields host, rank"):
        eval(call)


def test_a_tuple_has_no_other_attributes_and_survives_copies() -> None:
    place = Place("a", 1)
    with pytest.raises(AttributeError):
        place.rank = 2  # type: ignore[misc]
    with pytest.raises(AttributeError):
        place.size = 2  # type: ignore[attr-defined]
    for other in (copy.copy(place), copy.deepcopy(place), pickle.loads(pickle.dumps(place))):
        assert (type(other), other) == (Place, place)


@pytest.mark.parametrize("role", ["first_of_several", "worker", "single"])
def test_train_does_not_import_typing(role: str) -> None:
    slow = "{'typing', 'inspect', 'subprocess'}"
    program = f"import sys, shoal_toolkit.cli, shoal_toolkit.run.{role}; print({slow} & {{*sys.modules}})"
    command = [sys.executable, "-S", "-c", program]
    ended = subprocess.run(
        command, capture_output=True, text=True, check=True, env={"PYTHONPATH": os.pathsep.join(sys.path)}
    )
    assert ended.stdout == "set()\n"
