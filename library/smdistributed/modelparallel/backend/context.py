"""The job as this process knows it after `smp.init`: configuration, grid of ranks, groups. `backend.api` reads it.

Also starts the timeline that SMP_TIMELINE asks for.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from smdistributed.core import timeline
from smdistributed.core.launch import Launch, read_launch
from smdistributed.modelparallel.backend.config import PLACEMENTS, Config, read_config
from smdistributed.modelparallel.backend.exceptions import SMPConfigError, StepUsageError
from smdistributed.modelparallel.backend.object_exchange import ObjectExchange

GROUPS = {"WORLD": "", "MP_GROUP": "D", "DP_GROUP": "P", "PP_GROUP": "DT", "TP_GROUP": "DP", "RDP_GROUP": "PT"}
"""Groups by the coordinates that their members share: D (reduced data parallel), P (stage), T (tensor parallel)."""
_LACKS_MPI = (
    ' In an estimator, `distribution` also needs "mpi": {"enabled": True, "processes_per_host": N}, as for AWS.'
)


@dataclass(frozen=True)
class Grid:
    """All ranks of a job: `size` is stages × tensors × replicas.

    `order`: the coordinates D, P and T; the rightmost one varies fastest with the rank.
    """

    size: int
    stages: int
    tensors: int
    order: str

    @classmethod
    def of(cls, config: Config, size: int) -> Grid:
        """Raises SMPConfigError for part of a replica, or for several replicas without `ddp` or `horovod`."""
        stages, tensors = config.pipeline_parallel_degree, config.tensor_parallel_degree
        if size % (stages * tensors):
            raise SMPConfigError(
                f"'partitions' is {stages}, but the job has {size} ranks. Fix: start a multiple of {stages * tensors}."
                + _LACKS_MPI * (size == 1)
            )
        if size > stages * tensors and not (config.ddp or config.horovod):
            raise SMPConfigError(
                f"The job has {size} ranks for {stages * tensors} partitions. Fix: set 'ddp' to true to train "
                f"{size // (stages * tensors)} replicas, or start {stages * tensors} ranks."
            )
        shards, replicas = config.sharded_data_parallel_degree, size // (stages * tensors)
        if replicas % shards:
            raise SMPConfigError(
                f"'sharded_data_parallel_degree' is {shards}, but the job has {replicas} replicas. Fix: start a "
                f"multiple of {shards}, or set it to a divisor of {replicas}."
            )
        return cls(size, stages, tensors, PLACEMENTS[config.placement_strategy])

    @cached_property
    def coordinates(self) -> tuple[dict[str, int], ...]:
        """The coordinates D, P and T of every rank."""
        sizes = {"D": self.size // (self.stages * self.tensors), "P": self.stages, "T": self.tensors}
        found = []
        for rank in range(self.size):
            rest, at = rank, {}
            for letter in reversed(self.order):
                rest, at[letter] = divmod(rest, sizes[letter])
            found.append(at)
        return tuple(found)

    def group(self, name: str, rank: int) -> tuple[int, ...]:
        """Lists the ranks, ascending, of the group with that name (a key of GROUPS) that has `rank` as a member."""
        shared = GROUPS[name]
        mine = [self.coordinates[rank][letter] for letter in shared]
        everybody = range(self.size)
        return tuple(r for r in everybody if [self.coordinates[r][letter] for letter in shared] == mine)

    def groups(self, name: str) -> tuple[tuple[int, ...], ...]:
        return tuple(dict.fromkeys(self.group(name, rank) for rank in range(self.size)))


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
                "smdistributed.dataparallel. Fix: import one. Replicas of a partitioned model need 'ddp': true in "
                "mp_parameters."
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
        """Returns this rank's group, as ascending ranks of the job. `name` is a key of GROUPS."""
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
