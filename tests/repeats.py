"""How often tests repeat what they draw at random: a few times in the suite, many times in `make soak`.

`make soak` sets SHOAL_SOAK and draws a seed, which the header of the run prints; `make soak SEED=…` repeats that run.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any, TypeVar

import pytest

Test = TypeVar("Test", bound=Callable[..., None])

SOAK = "SHOAL_SOAK" in os.environ
SEED = int(os.environ.setdefault("SHOAL_SEED", str(random.SystemRandom().randrange(1 << 31) if SOAK else 2026)))
"""Set in the environment, so that the workers of pytest-xdist have the same one."""


def times(usual: int, soak: int) -> int:
    """Return how often to repeat."""
    return soak if SOAK else usual


_ONLY_IN_SOAK = (pytest.mark.soak, pytest.mark.skipif(not SOAK, reason="`make soak` runs it"))


def only_in_soak(test: Test) -> Test:
    """Leave a test to `make soak`: others show in the suite, in parts, what it shows."""
    for mark in _ONLY_IN_SOAK:
        test = mark(test)
    return test


def in_soak(*values: Any, name: str | None = None) -> Any:
    """Return a parameter of a test that only `make soak` takes."""
    return pytest.param(*values, id=name, marks=_ONLY_IN_SOAK)
