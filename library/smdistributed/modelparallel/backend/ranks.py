"""The grid of ranks: pipeline stages, tensor-parallel and data-parallel ranks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from smdistributed.modelparallel.backend.config import PLACEMENTS, Config
from smdistributed.modelparallel.backend.exceptions import SMPConfigError

GROUPS = {"WORLD": "", "MP_GROUP": "D", "DP_GROUP": "P", "PP_GROUP": "DT", "TP_GROUP": "DP", "RDP_GROUP": "PT"}
"""Groups by the coordinates that their members share: D (reduced data parallel), P (stage), T (tensor parallel)."""


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
            )
        if size > stages * tensors and not (config.ddp or config.horovod):
            raise SMPConfigError(
                f"The job has {size} ranks for {stages * tensors} partitions. Fix: set 'ddp' to true to train "
                f"{size // (stages * tensors)} replicas, or start {stages * tensors} ranks."
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
