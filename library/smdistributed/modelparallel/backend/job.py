"""This process's place in the job, as the front's `smp.init` has set it up: the one that `backend.api` asks."""

from __future__ import annotations

import sys

from smdistributed.modelparallel.backend.config import Config
from smdistributed.modelparallel.backend.exceptions import SMPConfigError, StepUsageError
from smdistributed.modelparallel.backend.object_exchange import ObjectExchange
from smdistributed.modelparallel.backend.ranks import Grid


class Job:
    """A front's `init` sets the attributes, then calls `begin`; before, only `initialized` may be asked."""

    cfg: Config
    grid: Grid
    rank: int
    local_rank: int
    local_size: int
    objects: ObjectExchange

    def __init__(self) -> None:
        self.initialized = False

    def begin(self) -> None:
        """All attributes are set: from now on this is the job of the process."""
        global _current
        self.initialized = True
        _current = self

    def group(self, name: str) -> tuple[int, ...]:
        """The ranks of this rank's group of that name (a key of `backend.ranks.GROUPS`)."""
        self.require()
        return self.grid.group(name, self.rank)

    def require(self) -> None:
        """Raises StepUsageError before `smp.init`."""
        if not self.initialized:
            raise StepUsageError("smp.init() has not been called: call it first, on every rank.")


_current = Job()


def current() -> Job:
    """The job that has begun in this process; before, one that is not initialized."""
    return _current


def refuse_dataparallel() -> None:
    """Raises SMPConfigError when the script has imported smdistributed.dataparallel as well."""
    if "smdistributed.dataparallel" in sys.modules:
        raise SMPConfigError(
            'Using "modelparallel" and "dataparallel" in one job is not supported: this process has imported '
            "smdistributed.dataparallel. For replicas of a partitioned model set 'ddp' to true in mp_parameters."
        )
