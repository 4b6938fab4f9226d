"""The reductions of the first-generation API, shared by the frameworks."""

from __future__ import annotations

from enum import Enum


class ReduceOp(Enum):
    """How a collective combines the ranks' tensors, element by element (AWS developer guide, 1.x)."""

    AVERAGE = "average"
    SUM = "sum"
    MIN = "min"
    MAX = "max"
