"""The cases of the tests: launchers, and the two hosts of a job."""

from __future__ import annotations

import pytest

from .job import Launcher

LOST_CODE = 138  # of a job that lost a host: another start may succeed
WHICH = {"algo-1": "the first host", "algo-2": "a worker"}
EITHER_HOST = pytest.mark.parametrize("host", list(WHICH))


def launchers(*chosen: Launcher) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("launcher", chosen, ids=str)
