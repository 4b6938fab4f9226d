"""How often tests repeat what they draw at random: a few times in the suite, many times in `make soak`.

`make soak` sets SHOAL_SOAK and draws a seed, which the header of the run prints; `make soak SEED=…` repeats that run.
"""

from __future__ import annotations

import os
import random
from typing import Any

import pytest

SOAK = "SHOAL_SOAK" in os.environ
SEED = int(os.environ.setdefault("SHOAL_SEED", str(random.SystemRandom().randrange(1 << 31) if SOAK else 2026)))
"""Set in the environment, so that the workers of pytest-xdist have the same one."""


def times(usual: int, soak: int) -> int:
    """Return how often to repeat."""
    return soak if SOAK else usual


def in_soak(*values: Any) -> Any:
    """Return a parameter of a test that only `make soak` takes: others show what it would in the suite."""
    return pytest.param(*values, marks=[pytest.mark.soak, pytest.mark.skipif(not SOAK, reason="a case of `make soak`")])
