"""The cases of the tests: launchers, and the two hosts of a job."""

from __future__ import annotations

import pytest

from ..repeats import in_soak
from .job import Launcher

LOST_CODE = 138  # of a job that lost a host: another start may succeed
WHICH = {"algo-1": "the first host", "algo-2": "a worker"}
EITHER_HOST = pytest.mark.parametrize("host", list(WHICH))


def launchers(*chosen: Launcher, soak: tuple[Launcher, ...] = ()) -> pytest.MarkDecorator:
    """Repeat a test with some launchers, and with those in `soak` in `make soak` and `make bench-faults`.

    The latter are those where the same code of `train` notices and reports the fault as with one of the others.
    """
    return pytest.mark.parametrize("launcher", [*chosen, *map(in_soak, soak)], ids=str)
