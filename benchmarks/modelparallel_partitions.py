"""How even automatic partitions are, against the published algorithm: `partitions` of modelparallel.py.

Both place the same modules with the library's costs: shares of memory and of operations. The costs come from a trace on
the meta device, with the default configuration. Nothing is timed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from partition_models import MODELS, construct
from report import Figure, finish
from tree_partition import tree_partition

from smdistributed.modelparallel.backend.config import check
from smdistributed.modelparallel.backend.partition import cut, shares
from smdistributed.modelparallel.torch.plan.auto_partition import items, partition
from smdistributed.modelparallel.torch.plan.trace import trace

STAGES = (2, 4, 8)
NEAR = 1.03
"""Times the best contiguous cut."""


def partitions(_: int = 0) -> list[Figure]:
    """One figure for each model and number of stages."""
    return [figure for name in MODELS for figure in _figures(name)]


def _figures(name: str) -> Iterator[Figure]:
    """The largest stage over the ideal one, which is the whole divided by the stages."""
    model, batch = construct(name)
    found = trace(model, (), dict(batch))
    for stages in STAGES:
        config = check({"partitions": stages})
        given = items(model, config, found)
        ideal = sum(given.costs) / stages
        least = cut(given.costs, given.names, given.together, stages).optimum / ideal
        ours = stages * max(partition(model, config, found).shares)
        placed = tree_partition(given.names, given.costs, given.together, stages)
        rival = stages * max(shares(given.costs, placed, stages))
        yield Figure(f"partition-{name}-{stages}", ours, "ideal", NEAR * least, rival, "tree", ceiling=1.0)


if __name__ == "__main__":
    sys.exit(finish(partitions()))
