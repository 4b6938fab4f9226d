"""The job as this process knows it after `smp.init`: configuration, ranks and groups. `backend.api` reads it.

Also starts the timeline that SMP_TIMELINE asks for.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from smdistributed.core import timeline
from smdistributed.core.launch import Launch, read_launch
from smdistributed.modelparallel.backend.config import Config, read_config
from smdistributed.modelparallel.backend.exceptions import SMPConfigError, StepUsageError
from smdistributed.modelparallel.backend.object_exchange import ObjectExchange
from smdistributed.modelparallel.backend.ranks import Grid

_TIMELINE_VARIABLE, _TIMELINE_FILE = "SMP_TIMELINE", "smp_timeline.json"


class Context:
    """The job as this process sees it. A front's `init` sets the attributes, then calls `begin`.

    Before, only `initialized` may be read.
    """

    cfg: Config
    grid: Grid
    rank: int
    local_rank: int
    local_size: int
    objects: ObjectExchange

    def __init__(self) -> None:
        self.initialized = False

    def configure(self, argument: Mapping[str, Any] | None) -> Launch:
        """Sets `cfg`, `rank`, `local_rank` and `local_size`; the latter is the world size if the launcher does not say.

        Raises SMPConfigError, SMPUnsupportedError, or LaunchError if the environment does not say which rank this is.
        """
        if "smdistributed.dataparallel" in sys.modules:
            raise SMPConfigError(
                'Using "modelparallel" and "dataparallel" in one job is not supported. This process has imported '
                "smdistributed.dataparallel. For replicas of a partitioned model set 'ddp' to true in mp_parameters."
            )
        self.cfg = read_config(argument, os.environ)
        launch = read_launch()
        self.rank, self.local_rank = launch.rank, launch.local_rank
        self.local_size = launch.local_world_size or launch.world_size
        return launch

    def begin(self) -> None:
        """Makes this the context of the process. All attributes must be set."""
        global _current
        self.initialized = True
        _current = self

    def group(self, name: str) -> tuple[int, ...]:
        """Returns this rank's group, as ascending ranks of the job. `name` is a key of `backend.ranks.GROUPS`."""
        self.require()
        return self.grid.group(name, self.rank)

    def require(self) -> None:
        """Raises StepUsageError before `smp.init`."""
        if not self.initialized:
            raise StepUsageError("smp.init() has not been called. Fix: call it first, on every rank.")


_current = Context()


def current_context() -> Context:
    """The context that has begun in this process; before that, one that is not initialized."""
    return _current


def start_timeline(rank: int, world_size: int) -> None:
    """Records a timeline of each rank if SMP_TIMELINE names a directory or a `.json` file.

    `shoal timeline` merges the files into one page. Raises TimelineError if the file cannot be written.
    """
    timeline.start_if_requested(_TIMELINE_VARIABLE, rank, world_size, default_name=_TIMELINE_FILE)
